"""torchtitan's trainer with a Llama 3 that has hyper-connections, on two CPU processes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


PARALLELISMS = {
    "sharded": (),
    "tensor": ("--parallelism.tensor_parallel_degree", "2"),
    "pipeline": ("--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_schedule", "1F1B"),
}


def make_assets(parent: Path) -> None:
    """Make a tokenizer and a text where torchtitan's trainer finds them if it runs in the folder `parent`."""
    import tokenizers

    texts = [path.read_text() for path in sorted(HERE.glob("*.py"))]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<begin>", "<end>"]
    tokenizer.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(vocab_size=512, special_tokens=special))
    folder = parent / "tests" / "assets"
    (folder / "tokenizer").mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    words = dict(zip(("bos_token", "eos_token"), special))
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(words))
    (folder / "c4_test").mkdir()
    (folder / "c4_test" / "data.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def train(folder: Path, module: str, *options: str) -> dict[int, float]:
    """Train on two processes, by default for three steps, and return the losses that the log has, by step."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    settings = {
        "--module": module,
        "--config": "llama3_debugmodel",
        "--training.steps": "3",
        "--training.local_batch_size": "2",  # a pipeline needs as many microbatches as stages
        "--training.seq_len": "32",
        "--debug.seed": "0",
        "--parallelism.spmd_backend": "partial_dtensor",
        "--override.imports": "cpu_attention.dense_attention",
    }
    words = [word for pair in settings.items() for word in pair]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    ended = subprocess.run(
        [*launch, str(HERE / "titan_on_cpu.py"), *words, "--training.disable_cuda_graphs", *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    log = re.sub(r"\x1b\[[0-9;]*m", "", ended.stdout + ended.stderr)
    return {int(step): float(loss) for step, loss in re.findall(r"step: +(\d+) +loss: +([\d.]+)", log)}


@pytest.mark.distributed
@pytest.mark.parametrize("options", PARALLELISMS.values(), ids=PARALLELISMS)
def test_trains_from_the_plain_model_and_resumes(tmp_path: Path, options: tuple[str, ...]):
    """Fully sharded, tensor parallel with streams that are sharded by tokens, or with streams between two stages."""
    pytest.importorskip("torchtitan.train", reason="needs torchtitan and the packages that it uses")
    make_assets(tmp_path)
    plain = train(tmp_path, "llama3", *options)
    saving = (*options, "--dump_folder", "out", "--checkpoint.enable", "--checkpoint.interval", "2")
    losses = train(tmp_path, "jpmhc.integrations.torchtitan", *saving)
    assert losses[1] == plain[1]  # a fresh connection is the plain residual
    assert losses[3] != plain[3]
    last = tmp_path / "out" / "checkpoint" / "step-3"
    last.rename(tmp_path / "later")
    assert train(tmp_path, "jpmhc.integrations.torchtitan", *saving) == {3: losses[3]}
