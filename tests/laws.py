"""What every mixer owes, as functions that raise when a law is broken. Run over all of MIXERS."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import jpmhc
from jpmhc.mixers import Mixer

MEMBERSHIP = {torch.float32: 3e-6, torch.float64: 1e-13}


def membership(mixer: Mixer, dtype: torch.dtype) -> float:
    """How far rounding may take a matrix from its set; a frame that was stored in float32 stays rounded."""
    return MEMBERSHIP[torch.float32 if mixer.grassmann_frames else dtype]


def random_logits(mixer: Mixer, *shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, mixer.logits, dtype=dtype, generator=generator)


def start_is_a_member_that_keeps_equal_streams(mixer: Mixer) -> None:
    matrix = mixer.double()(mixer.start().double())
    bound = membership(mixer, torch.float64)
    assert mixer.violation(matrix) <= bound
    assert (matrix.sum(-1) - 1).abs().max() <= bound, "rows must sum to one at the start"


def any_logits_give_a_member(mixer: Mixer, dtype: torch.dtype) -> None:
    matrix = mixer.to(dtype)(random_logits(mixer, 64, dtype=dtype))
    assert matrix.dtype == dtype
    assert mixer.violation(matrix).max() <= membership(mixer, dtype)


def half_precision_is_computed_in_float32(mixer: Mixer) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        logits = random_logits(mixer, 5, dtype=dtype)
        matrix = mixer(logits)
        assert matrix.dtype == torch.float32
        assert torch.equal(matrix, mixer(logits.float()))


def autocast_changes_nothing(mixer: Mixer) -> None:
    logits = random_logits(mixer, 5, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = mixer(logits)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, mixer(logits))


def batch_equals_loop(mixer: Mixer) -> None:
    logits = random_logits(mixer.double(), 3, 4)
    batched = mixer(logits)
    assert batched.shape == (3, 4, mixer.streams, mixer.streams)
    for i in range(3):
        for j in range(4):
            assert torch.allclose(batched[i, j], mixer(logits[i, j]), atol=1e-14)


def transforms_agree(mixer: Mixer) -> None:
    """vmap, jvp and vjp of torch.func against the batch and against each other."""
    mixer = mixer.double()
    logits, tangent = random_logits(mixer, 6), random_logits(mixer, 6, seed=1)
    assert torch.allclose(torch.func.vmap(mixer)(logits), mixer(logits), atol=1e-14)
    out, pushed = torch.func.jvp(mixer, (logits,), (tangent,))
    _, pull = torch.func.vjp(mixer, logits)
    cotangent = torch.randn_like(out)
    assert torch.isclose((pushed * cotangent).sum(), (pull(cotangent)[0] * tangent).sum(), atol=1e-12)


def derivative_is_exact(mixer: Mixer) -> None:
    logits = random_logits(mixer.double(), 2).requires_grad_()
    if logits.numel():
        assert torch.autograd.gradcheck(mixer, logits)


def compiled_equals_eager(mixer: Mixer) -> None:
    mixer = mixer.double()
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    logits = random_logits(mixer, 6).requires_grad_()
    weights = torch.randn(6, mixer.streams, mixer.streams, dtype=torch.float64)
    results = []
    for function in (mixer, compiled):
        out = function(logits)
        gradient = torch.autograd.grad((out * weights).sum(), logits)[0] if logits.numel() else logits
        results.append((out, gradient))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-13)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-13)


def survives_saving(make: Callable[[], nn.Module], x: Tensor) -> None:
    block = make()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    other = make()
    other.load_state_dict(copy.deepcopy(block.state_dict()))
    assert torch.equal(block(x), other(x))


def stays_a_member_while_training(block: jpmhc.HyperConnection, x: Tensor, optimizer: torch.optim.Optimizer) -> None:
    target = torch.randn_like(x)
    for _ in range(10):
        optimizer.zero_grad()
        (block(x) - target).square().mean().backward()
        optimizer.step()
    skip = block.coefficients(x).skip
    assert block.mixer.violation(skip).max() <= MEMBERSHIP[skip.dtype]
