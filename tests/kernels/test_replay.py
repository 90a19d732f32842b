"""Steps that run again from their recording: the same numbers, whatever the addresses, and nothing left out."""

import pytest
import torch
from torch import Tensor

from jpmhc.kernels import read, replay, write, write_read
from jpmhc.kernels.launch import power_of_two
from tests.kernels.connection_cases import DEVICE, draw, make_case

PASSES = {"read": read.read, "write": write.write, "write_read": write_read.write_read}
FORWARD, WRITE_BACKWARD = write.write.forward.__wrapped__, write.write.backward.__wrapped__


@pytest.fixture(autouse=True)
def recordings(monkeypatch) -> dict:
    monkeypatch.setattr(replay, "_recordings", {})
    return replay._recordings


def count(step):
    """The step as `replayed` makes it, and how often its own code ran."""
    runs = []

    def counted(*given):
        runs.append(given)
        return step(*given)

    return replay.replayed(counted), runs


def same(one, other) -> bool:
    """Equal in every bit, but for what nobody writes: links, and the gaps in buffers, which begin with the logits."""
    pairs = zip(one if isinstance(one, tuple) else (one,), other if isinstance(other, tuple) else (other,))
    pairs = [(a, b) for a, b in pairs if a is None or a.dtype == torch.uint8 or 0 not in a.stride()]
    pairs = [(a[:32], b[:32]) if a is not None and a.dtype == torch.uint8 else (a, b) for a, b in pairs]
    return all((a is None and b is None) or torch.equal(a, b) for a, b in pairs)


def results(case, seed: int, dynamic: bool = True, tokens: int = 5) -> dict[str, tuple]:
    """The arguments of every step, of fresh numbers, in a shape with two leading dimensions."""
    spec = case.spec
    given = draw(case, tokens, torch.float32, 1.0, dynamic, seed)
    x = given["x"].reshape(1, tokens, spec.n, spec.d)
    weight, bias = given["weight"], given["bias"]
    steps = {name: (own.forward.__wrapped__, own.backward.__wrapped__) for name, own in PASSES.items()}
    h, _, coef, kept = steps["read"][0](x, weight, bias, spec, True)
    y, grad = torch.randn_like(h), torch.randn_like(x)
    found = {
        "read": (steps["read"][0], (x, weight, bias, spec, True)),
        "write": (steps["write"][0], (x, y, coef, spec, False)),
        "mean": (steps["write"][0], (x, y, coef, spec, True)),
        "write_backward": (steps["write"][1], (x, y, coef, grad, spec, False, False)),
        "pulled": (steps["write"][1], (x, y, coef, grad, spec, False, True)),
        "read_backward": (steps["read"][1], (x, weight, bias, coef, kept, y, grad, torch.randn_like(coef), spec)),
    }
    if dynamic:
        forward, backward = steps["write_read"]
        given = (x, y, coef, weight, bias)
        *_, out, new, kept = forward(*given, spec, spec, False, True)
        gradients = (torch.randn_like(h), grad, None, torch.randn_like(new))
        found |= {
            "write_read": (forward, (*given, spec, spec, False, True)),
            "write_read_backward": (backward, (*given, out, new, kept, *gradients, spec, spec, False, False)),
            "decode": (forward, (*given, spec, spec, False, False)),
        }
        if not spec.post_norm:  # with a post-norm the write and a delayed read are two kernels
            found["delayed"] = (forward, (*given, spec, spec, True, True))
    return found


@pytest.mark.parametrize("settings", [{}, {"post_norm": True, "norm": "rms"}])
def test_every_step_is_replayed_and_gives_the_same_bits(settings) -> None:
    case = make_case("cayley", d=16, **settings)
    for name, (step, given) in results(case, 0).items():
        replayed, runs = count(step)
        for seed in range(5):
            other = results(case, seed)[name][1]
            assert same(replayed(*other), step(*other)), (name, seed)
        assert len(runs) == 2, name  # the first run and the recorded one
        assert len(given) == len(runs[0])


def test_replays_allocate_anew(recordings) -> None:
    case = make_case("cayley", d=16)
    step, given = results(case, 0)["read"]
    replayed, _ = count(step)
    kept = [replayed(*given) for _ in range(5)]
    assert len({t.data_ptr() for found in kept for t in found}) == 5 * 4


@pytest.mark.parametrize("name", ["read", "read_backward", "write_backward"])
def test_static_connections_which_use_pytorch_between_kernels_run_as_they_are(name) -> None:
    case = make_case("cayley", d=16)
    step = results(case, 0, dynamic=False)[name][0]
    replayed, runs = count(step)
    for seed in range(5):
        given = results(case, seed, dynamic=False)[name][1]
        assert same(replayed(*given), step(*given))
    assert len(runs) == 5


def test_a_gradient_that_is_added_in_between_is_not_lost() -> None:
    case = make_case("cayley", d=16)
    replayed, runs = count(write_read.write_read.backward.__wrapped__)
    for seed in range(4):
        step, given = results(case, seed)["write_read_backward"]
        given = (*given[:10], torch.randn_like(given[5]), *given[11:])
        assert same(replayed(*given), step(*given))
    assert len(runs) == 4


def test_other_shapes_types_and_strides_have_runs_of_their_own() -> None:
    case = make_case("cayley", d=16)
    replayed, runs = count(FORWARD)
    x, y, coef, spec, mean = results(case, 0, tokens=6)["write"][1]
    for _ in range(4):
        assert same(replayed(x, y, coef, spec, mean), FORWARD(x, y, coef, spec, mean))
    assert len(runs) == 2
    shape = (2, 3, spec.n, spec.d)
    assert replayed(x.view(shape), y.view(2, 3, -1), coef, spec, mean).shape == shape
    assert len(runs) == 3
    strided = torch.stack([x, x], -1)[..., 0]
    shifted = torch.cat([torch.zeros(1, device=DEVICE), x.flatten()])[1:].view(x.shape)
    one_row = coef[:1].contiguous()
    for streams, rows in ((strided, coef), (shifted, coef), (x, one_row), (x, one_row), (x, one_row)):
        assert same(replayed(streams, y, rows, spec, mean), FORWARD(streams, y, rows, spec, mean))


def test_equal_addresses_are_not_recorded() -> None:
    case = make_case("cayley", d=16)
    x, y, coef, spec, _ = results(case, 0)["write"][1]
    replayed, runs = count(WRITE_BACKWARD)
    for _ in range(3):
        replayed(x, y, coef, x, spec, False, True)
    assert len(runs) == 3
    for seed in range(4):
        grad = torch.randn_like(x) + seed
        assert same(replayed(x, y, coef, grad, spec, False, True), WRITE_BACKWARD(x, y, coef, grad, spec, False, True))
    assert len(runs) == 4


def test_ever_new_shapes_are_forgotten(monkeypatch, recordings) -> None:
    monkeypatch.setattr(replay, "MOST_RECORDINGS", 4)
    replayed, _ = count(lambda x: x.new_empty(x.shape))
    for tokens in range(1, 20):
        replayed(torch.zeros(power_of_two(tokens) + tokens))
    assert len(recordings) <= 4


def test_what_a_step_returns_may_be_what_it_was_given_or_none() -> None:
    def step(x: Tensor, y: Tensor) -> tuple[Tensor | None, ...]:
        return y, None, x.new_empty(0)

    replayed, runs = count(step)
    for _ in range(4):
        x, y = torch.zeros(3), torch.ones(2)
        same_y, nothing, empty = replayed(x, y)
        assert same_y is y
        assert nothing is None
        assert empty.shape == (0,)
    assert len(runs) == 2


def test_a_step_inside_another_is_a_part_of_its_recording() -> None:
    case = make_case("cayley", d=16)
    whole, runs = count(lambda *given: write.write.forward(*given))
    for seed in range(5):
        step, given = results(case, seed)["write"]
        assert same(whole(*given), step(*given))
    assert len(runs) == 2


def test_an_empty_result_is_not_the_argument() -> None:
    replayed, _ = count(torch.empty_like)
    x = torch.empty(0, 4)
    assert all(replayed(x) is not x for _ in range(4))


@pytest.mark.parametrize("name", ["read", "read_backward", "write_read", "write_read_backward", "decode"])
@pytest.mark.parametrize("kind", ["strided", "shifted"])
def test_a_bias_in_any_memory_gives_the_same(name: str, kind: str) -> None:
    """Flattened parameters start anywhere, and those of `load_state_dict(assign=True)` keep their strides."""
    case = make_case("cayley", d=16)
    step, given = results(case, 0)[name]
    place = next(k for k, a in enumerate(given) if isinstance(a, Tensor) and a.shape == (case.spec.logits,))
    bias = given[place]
    moved = torch.stack([bias, bias.flip(0)], -1)[:, 0] if kind == "strided" else torch.cat([bias[:1], bias])[1:]
    assert (moved.data_ptr() % 16 != 0) == (kind == "shifted")
    assert same(step(*given[:place], moved, *given[place + 1 :]), step(*given))
