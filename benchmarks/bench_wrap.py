"""A wrapped Llama-style model beside the plain one, or an accelerated DeepSeek-V4-style model beside the original:
step time, memory, and tokens per second in `generate`.

    python benchmarks/bench_wrap.py [--size large] [--mixers cayley sinkhorn] [--modes eager compiled] [--folder DIR]
    python benchmarks/bench_wrap.py --accelerate

`large` is eight layers of d = 2048, 16 heads, bfloat16, 4 × 2048 tokens a step, and generation of 128 tokens for one
and for eight prompts of 128. `tiny` is for machines without CUDA. All models run in one process, and a wrapped model
whose logits differ from the plain one's is not timed. Memory is the most that one step takes beyond the model. With
`--accelerate` the model has four layers of d = 2048, 16 heads and 8 experts.
"""

import argparse
import copy
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

import jpmhc
from harness import RESULTS, milliseconds, write_csv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


class Size(NamedTuple):
    layers: int
    dim: int
    heads: int
    inner: int
    vocabulary: int
    batch: int
    length: int
    prompt: int
    new: int


SIZES = {"tiny": Size(2, 64, 2, 128, 256, 2, 32, 8, 8), "large": Size(8, 2048, 16, 5632, 32000, 4, 2048, 128, 128)}


def make_plain(size: Size) -> Any:
    """A Llama with random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.dim,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=2 * size.length,
        attn_implementation="sdpa",
    )
    with torch.device(DEVICE):  # to draw the weights on the CPU would take longer than to time the model
        return transformers.LlamaForCausalLM(config).to(DTYPE)


def make_models(size: Size, mixers: list[str]) -> dict[str, Any]:
    """The plain model and wrapped ones, each checked to compute the same."""
    plain = make_plain(size)
    tokens = torch.randint(size.vocabulary, (1, 64), device=DEVICE)
    models = {"plain": plain}
    for mixer in mixers:
        model = jpmhc.wrap(copy.deepcopy(plain), mixer=mixer)
        with torch.no_grad():
            old, new = plain(tokens).logits.float(), model(tokens).logits.float()
        difference = float((old - new).abs().max() / old.abs().max())
        print(f"{mixer}: logits differ by {difference:.1e} of the largest", flush=True)
        if difference > torch.finfo(DTYPE).eps ** 0.5:
            raise RuntimeError(f"the model wrapped with {mixer} does not compute the same; refusing to time it")
        models[mixer] = model
    return models


def make_accelerated(size: Size) -> dict[str, Any]:
    """A DeepSeek-V4 with random weights, and the same one with its connections on the kernels."""
    from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV4Config(
        vocab_size=size.vocabulary,
        hidden_size=size.dim,
        moe_intermediate_size=size.dim,
        num_hidden_layers=max(2, size.layers // 2),
        num_attention_heads=size.heads,
        head_dim=size.dim // size.heads,
        q_lora_rank=size.dim // 4,
        num_experts_per_tok=2,
        n_routed_experts=8,
        max_position_embeddings=2 * size.length,
        o_groups=2,
        o_lora_rank=size.dim // 4,
        index_n_heads=size.heads,
        index_head_dim=size.dim // size.heads // 2,
        num_nextn_predict_layers=0,
        pad_token_id=0,
    )
    with torch.device(DEVICE):
        original = DeepseekV4ForCausalLM(config)
    ours = jpmhc.accelerate(copy.deepcopy(original))
    tokens = torch.randint(size.vocabulary, (1, 64), device=DEVICE)
    with torch.no_grad():  # in float32: in bfloat16 rounding sends tokens to other experts
        old, new = original(tokens).logits, ours(tokens).logits
    difference = float((old - new).abs().max() / old.abs().max())
    print(f"accelerated: logits differ by {difference:.1e} of the largest", flush=True)
    if not difference < 1e-4:
        raise RuntimeError("the accelerated model does not compute the same; refusing to time it")
    return {"original": original.to(DTYPE), "accelerated": ours.to(DTYPE)}


def time_steps(name: str, model: Any, size: Size, modes: list[str], repeats: int) -> list[dict[str, Any]]:
    """Time and memory of one training step, forward, backward and optimiser."""
    rows = []
    tokens = torch.randint(size.vocabulary, (size.batch, size.length), device=DEVICE)
    for mode in modes:
        model.train()
        run = torch.compile(model) if mode == "compiled" else model
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

        def step(run: Callable[..., Any] = run, optimizer: Any = optimizer) -> None:
            run(tokens, labels=tokens, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        begin = time.perf_counter()
        step()
        first = time.perf_counter() - begin
        row: dict[str, Any] = {"model": name, "mode": mode, "tokens": tokens.numel(), "first_call_s": round(first, 1)}
        row["step_ms"] = round(milliseconds(step, repeats, 3, DEVICE), 2)
        if DEVICE == "cuda":
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            row["memory_gib"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 2)
        rows.append(row)
        print(row, flush=True)
        optimizer.zero_grad(set_to_none=True)
        torch.compiler.reset()
    return rows


def time_generation(name: str, model: nn.Module, size: Size, compiled: bool, repeats: int) -> list[dict[str, Any]]:
    """New tokens per second, for one prompt and for eight, with the growing cache and with a compiled static one."""
    rows = []
    model.eval()
    generate: Any = model.generate
    for batch in (1, 8):
        prompt = torch.randint(size.vocabulary, (batch, size.prompt), device=DEVICE)
        for cache in ("dynamic", "static") if compiled else ("dynamic",):

            def run(prompt: Tensor = prompt, cache: str = cache) -> None:
                generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=size.new,
                    min_new_tokens=size.new,
                    do_sample=False,
                    pad_token_id=0,
                    cache_implementation=cache,
                )

            took = milliseconds(run, repeats, 2, DEVICE)
            row = {"model": name, "batch": batch, "cache": cache, "new_tokens": size.new}
            row["tokens_per_s"] = round(batch * size.new / took * 1e3, 1)
            rows.append(row)
            print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="large" if DEVICE == "cuda" else "tiny")
    parser.add_argument("--mixers", nargs="+", default=["cayley", "sinkhorn"], choices=list(jpmhc.MIXERS))
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"], choices=["eager", "compiled"])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--skip-generation", action="store_true")
    parser.add_argument("--static-cache", action="store_true", help="also generate with a static cache, compiled")
    parser.add_argument("--accelerate", action="store_true", help="DeepSeek-V4 instead of a wrapped Llama")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where the CSV files go")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    size = SIZES[options.size]
    models = make_accelerated(size) if options.accelerate else make_models(size, options.mixers)
    name = "accelerate" if options.accelerate else "wrap"
    generated, steps = [], []
    if not options.skip_generation:
        for kind, model in models.items():
            generated += time_generation(kind, model, size, options.static_cache, max(3, options.repeats // 3))
        write_csv(f"{name}_generation", generated, DEVICE, options.folder)
    for kind, model in models.items():
        steps += time_steps(kind, model, size, options.modes, options.repeats)
    write_csv(f"{name}_step", steps, DEVICE, options.folder)


if __name__ == "__main__":
    main()
