"""The dialects of training libraries, Megatron-LM and Liger-Kernel, against their formulas in float64."""

import pytest
import torch
from torch import Tensor

from jpmhc.dialects import deepseek_v4, hy_v4, liger, megatron
from tests.dialects.compare import sinkhorn

N, D = 4, 5
WIDTH, LOGITS = N * D, N * (N + 2)
MEGATRON = ("mapping_proj.weight", "bias")
ALPHAS = ("alpha_pre", "alpha_post", "alpha_res")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def megatron_state(layers: int = 2, head: bool = True) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {"embedding.word_embeddings.weight": torch.ones(3)}
    for layer in range(layers):
        for k, site in enumerate(("self_attention_hyper_connection", "mlp_hyper_connection")):
            path = f"decoder.layers.{layer}.{site}."
            state[f"{path}mapping_proj.weight"] = 0.2 * draw(LOGITS, WIDTH, seed=10 * layer + k)
            state[f"{path}bias"] = 3 * draw(LOGITS, seed=20 + 10 * layer + k)
            state |= {path + name: draw(1, seed=40 + i) for i, name in enumerate(ALPHAS)}
    if head:
        state |= {
            "decoder.hc_head_fn": draw(N, WIDTH),
            "decoder.hc_head_base": draw(N),
            "decoder.hc_head_scale": draw(1),
        }
    return state


def liger_state(**changes: Tensor | None) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for k, path in enumerate(("blocks.0.attn", "blocks.0.ffn", "mixer")):
        state |= {f"{path}.phi": 0.2 * draw(WIDTH, LOGITS, seed=k), f"{path}.b": 3 * draw(LOGITS, seed=5 + k)}
        state |= {f"{path}.{name}": draw(seed=10 + 3 * k + i) for i, name in enumerate(ALPHAS)}
        state[f"{path}.layer.weight"] = draw(D, D)
    return {key: tensor for key, tensor in (state | changes).items() if tensor is not None}


def take(state: dict[str, Tensor], path: str, *names: str) -> list[Tensor]:
    return [state[f"{path}.{name}"].clone().requires_grad_() for name in (*names, *ALPHAS)]


def split(x, fn, base, alphas, root):
    """The logits of read, write and skip, of x divided by `root`."""
    mixed = x.flatten(1) @ fn.T / root
    each = torch.cat([alpha.reshape(1).expand(size) for alpha, size in zip(alphas, (N, N, N * N))])
    return (mixed * each + base).split((N, N, N * N), -1)


def assert_equal_with_gradients(connection, x, parameters, wanted):
    """Outputs and gradients agree, the latter for x and for the published parameters."""
    connection.sublayer = torch.tanh
    found = connection(x)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    direction = draw(*x.shape, seed=99)
    source = connection.map.source
    ours = torch.autograd.grad((found * direction).sum(), [x, source.fn, source.base, source.scale])
    theirs = torch.autograd.grad((wanted * direction).sum(), [x, *parameters])
    fn, base, scale = ours[1], ours[2], ours[3]
    published = fn if parameters[0].shape == fn.shape else fn.T
    for one, other in zip((ours[0], published, base, *scale), theirs, strict=True):
        torch.testing.assert_close(one.reshape(other.shape), other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("single_pass", [False, True])
def test_megatron_follows_its_formulas(single_pass):
    """At streams of size 1e-3 the place of the eps decides about three per cent of the logits."""
    state = megatron_state()
    connection = megatron.load(state, branch="dev", norm_eps=1e-4, single_pass=single_pass)["layers.1.ffn"]
    fn, base, *alphas = parameters = take(state, "decoder.layers.1.mlp_hyper_connection", *MEGATRON)
    x = (1e-3 * draw(9, N, D, seed=7)).requires_grad_()
    square = x.flatten(1).square().mean(1, keepdim=True)
    root = (square + 1e-4).sqrt() if single_pass else square.sqrt() + 1e-4
    read, write, skip = split(x, fn, base, alphas, root)
    h = torch.einsum("tn,tnd->td", read.sigmoid() + 1e-6, x)
    c = sinkhorn(skip.unflatten(1, (N, N)), 20, 1e-6)
    wanted = torch.einsum("tn,td->tnd", 2 * write.sigmoid(), h.tanh()) + c.mT @ x
    assert_equal_with_gradients(connection, x, parameters, wanted)


def test_megatron_s_branch_main_follows_its_formulas():
    """The matrix is not transposed, sums are bounded from below instead of shifted, reads have no eps."""
    state = megatron_state(head=False)
    connections = megatron.load(state, branch="main", norm_eps=1e-4, iterations=7)
    fn, base, *alphas = parameters = take(state, "decoder.layers.1.mlp_hyper_connection", *MEGATRON)
    x = (1e-3 * draw(9, N, D, seed=7)).requires_grad_()
    root = x.flatten(1).square().mean(1, keepdim=True).sqrt() + 1e-4
    read, write, skip = split(x, fn, base, alphas, root)
    h = torch.einsum("tn,tnd->td", read.sigmoid(), x)
    logits = skip.unflatten(1, (N, N))
    c = (logits - logits.amax(2, keepdim=True)).exp()
    for _ in range(7):
        c = c / c.sum(2, keepdim=True).clamp(min=1e-6)
        c = c / c.sum(1, keepdim=True).clamp(min=1e-6)
    wanted = torch.einsum("tn,td->tnd", 2 * write.sigmoid(), h.tanh()) + c @ x
    assert_equal_with_gradients(connections["layers.1.ffn"], x, parameters, wanted)
    assert torch.equal(connections["head"](x), x.mean(1))
    again = megatron.dump(connections, branch="main")
    assert again.keys() == {key for key in state if "embedding" not in key}
    assert all(torch.equal(again[key], state[key]) for key in again)


def test_megatron_s_branches_are_told_apart_by_the_head_or_by_the_caller():
    state = megatron_state(head=False)
    with pytest.raises(ValueError, match='same keys for different formulas: say branch="main" or branch="dev"'):
        megatron.load(state)
    with pytest.raises(ValueError, match="has no learned head, and these weights have one: say branch="):
        megatron.load(megatron_state(), branch="main")
    with pytest.raises(ValueError, match=r"no branch of Megatron is called 'release'; choose one of main, dev"):
        megatron.load(state, branch="release")
    with pytest.raises(ValueError, match='single_pass is a setting of Megatron\'s branch "dev"'):
        megatron.load(state, branch="main", single_pass=True)
    with pytest.raises(ValueError, match='say branch="main" or branch="dev"'):
        megatron.dump(megatron.load(state, branch="dev"))
    with pytest.raises(ValueError, match=r"transposed, but Megatron's branch main has Sinkhorn's matrix$"):
        megatron.dump(megatron.load(state, branch="dev"), branch="main")
    with pytest.raises(ValueError, match=r"is Sinkhorn's matrix, but DeepSeek-V4 has Sinkhorn's matrix transposed$"):
        deepseek_v4.dump(megatron.load(state, branch="main"))


def test_liger_follows_its_formulas():
    state = liger_state()
    connection = liger.load(state, iterations=5, read_eps=0.01, write_peak=3.0)["blocks.0.ffn"]
    phi, base, *alphas = parameters = take(state, "blocks.0.ffn", "phi", "b")
    x = draw(9, N, D, seed=7).requires_grad_()
    root = (x.flatten(1).square().mean(1, keepdim=True) + 1e-6).sqrt()
    read, write, skip = split(x, phi.T, base, alphas, root)
    h = torch.einsum("tn,tnd->td", read.sigmoid() + 0.01, x)
    c = sinkhorn(skip.unflatten(1, (N, N)), 5, 1e-6)  # by rows: out, then in
    wanted = torch.einsum("tn,td->tnd", 3 * write.sigmoid(), h.tanh()) + c @ x
    assert_equal_with_gradients(connection, x, parameters, wanted)


@pytest.mark.parametrize(("dialect", "make"), [(megatron, megatron_state), (liger, liger_state)])
def test_state_dicts_return_bit_for_bit(dialect, make):
    state = make()
    again = dialect.dump(dialect.load(state))
    kept = {key: tensor for key, tensor in state.items() if "layer.weight" not in key and "embedding" not in key}
    assert again.keys() == kept.keys()
    assert all(torch.equal(again[key], tensor) and again[key].shape == tensor.shape for key, tensor in kept.items())


def test_weights_change_their_names_between_dialects():
    """What Megatron trained is published under DeepSeek's names: the same numbers, the three scales in one tensor."""
    state = megatron_state()
    published = deepseek_v4.dump(megatron.load(state), "original")
    path = "decoder.layers.0.self_attention_hyper_connection."
    assert torch.equal(published["layers.0.hc_attn_fn"], state[f"{path}mapping_proj.weight"])
    assert published["layers.0.hc_attn_scale"].tolist() == [state[path + name].item() for name in ALPHAS]
    again = megatron.dump(deepseek_v4.load(published))
    assert all(torch.equal(state[key], tensor) for key, tensor in again.items())


def test_weights_are_not_given_to_a_dialect_that_means_something_else_by_them():
    connections = megatron.load(megatron_state())
    with pytest.raises(ValueError, match=r"the skip of layers\.0\.attn is Sinkhorn's matrix transposed, but HY-V4 has"):
        hy_v4.dump(connections)
    with pytest.raises(ValueError, match=r"transposed, but LigerMHC has Sinkhorn's matrix$"):
        liger.dump(connections)


def test_refusals_name_the_key():
    state = megatron_state()
    key = "decoder.layers.1.mlp_hyper_connection.alpha_post"
    del state[key]
    with pytest.raises(ValueError, match=f"the key '{key}' is missing"):
        megatron.load(state)
    with pytest.raises(ValueError, match=r"layers\.0\.attn\.write_scale must be one number, got the shape \[2\]"):
        megatron.load(megatron_state() | {"decoder.layers.0.self_attention_hyper_connection.alpha_post": torch.ones(2)})
    with pytest.raises(ValueError, match=r"the key 'blocks\.0\.attn\.phi' is missing"):
        liger.load(liger_state(**{"blocks.0.attn.phi": None}))
    with pytest.raises(ValueError, match=r"with 4 streams mixer\.fn must have the shape \[24, 20\], got \[23, 20\]"):
        liger.load(liger_state(**{"mixer.phi": torch.ones(20, 23)}))
    with pytest.raises(ValueError, match="no keys of LigerMHC"):
        liger.load({"weight": torch.ones(2)})
