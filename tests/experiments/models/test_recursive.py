"""The recursive model against the recursion written out in NumPy, and the rules of halting."""

import math

import numpy as np
import pytest
import torch

from jpmhc.connections import MIXERS, parameter_groups
from jpmhc.experiments.models.losses import row_cross_entropy
from jpmhc.experiments.models.recursive import RecursiveConfig, RecursiveModel, refill_rows, refuse_device
from jpmhc.optim import AdamAtan2, grassmann_frames

SMALL = RecursiveConfig(
    dim=16, heads=2, layers=2, inner_multiple=8, puzzle_slots=3, h_cycles=2, l_cycles=3, halt_max_steps=4
)


def build(config=SMALL, seed=0, vocabulary=6, length=5, identifiers=7):
    torch.manual_seed(seed)
    model = RecursiveModel(config, vocabulary, length, identifiers)
    with torch.no_grad():
        model.puzzles.weight.normal_(std=0.3)
        model.core.q_head.weight.normal_(std=0.3)
    return model


def batch(rows=4, seed=0, vocabulary=6, length=5, identifiers=7):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(1, vocabulary, (rows, length), generator=generator)
    labels = torch.randint(0, vocabulary, (rows, length), generator=generator)
    return inputs, labels, torch.randint(0, identifiers, (rows,), generator=generator)


class WrittenOut:
    """The plain model in float64 NumPy, from its description alone."""

    def __init__(self, model):
        self.w = {k: v.double().numpy() for k, v in model.state_dict().items()}
        self.c = model.config

    def norm(self, x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)

    def attention(self, x, i):
        _, length, d = x.shape
        q, k, v = np.split(x @ self.w[f"core.network.{i}.sublayer.qkv.weight"].T, 3, axis=-1)
        width = d // self.c.heads
        y = np.empty_like(x)
        half = width // 2
        angle = np.arange(length)[:, None] * 1e4 ** (-np.arange(half) / half)
        for head in range(self.c.heads):
            cut = slice(head * width, (head + 1) * width)

            def turn(t, cut=cut):
                z = (t[..., cut][..., :half] + 1j * t[..., cut][..., half:]) * np.exp(1j * angle)
                return np.concatenate((z.real, z.imag), -1)

            score = np.exp(turn(q) @ turn(k).swapaxes(-1, -2) / math.sqrt(width))
            y[..., cut] = score / score.sum(-1, keepdims=True) @ v[..., cut]
        return y @ self.w[f"core.network.{i}.sublayer.out.weight"].T

    def feed_forward(self, x, i):
        gate, up = np.split(x @ self.w[f"core.network.{i}.sublayer.gate_up.weight"].T, 2, axis=-1)
        return (gate / (1 + np.exp(-gate)) * up) @ self.w[f"core.network.{i}.sublayer.down.weight"].T

    def f(self, z, u):
        x = z + u
        for i in range(2 * self.c.layers):
            x = self.norm(x + (self.feed_forward(x, i) if i % 2 else self.attention(x, i)))
        return x

    def step(self, z_h, z_l, inputs, identifiers):
        x = np.zeros_like(z_h)
        x[:, 0] = self.w["puzzles.weight"][identifiers]
        x[:, self.c.puzzle_slots :] = self.w["core.tokens"][inputs]
        x *= math.sqrt(self.c.dim)
        for _ in range(self.c.h_cycles):
            for _ in range(self.c.l_cycles):
                z_l = self.f(z_l, z_h + x)
            z_h = self.f(z_h, z_l)
        logits = z_h[:, self.c.puzzle_slots :] @ self.w["core.token_head.weight"].T
        q = z_h[:, 0] @ self.w["core.q_head.weight"][0] + self.w["core.q_head.bias"][0]
        return z_h, z_l, logits, q


def test_parameters_at_the_size_of_the_paper():
    with torch.device("meta"):
        model = RecursiveModel(RecursiveConfig(), vocabulary=12, length=900, identifiers=876_406)
    assert sum(p.numel() for p in model.core.parameters()) == 6_829_058
    assert model.puzzles.weight.shape == (876_406, 512)


def test_prediction_equals_the_recursion_written_out():
    model = build().double()
    model.core.dtype = torch.float64
    inputs, _, identifiers = batch()
    oracle = WrittenOut(model)
    shape = (4, SMALL.puzzle_slots + 5, SMALL.dim)
    z_h = np.broadcast_to(model.core.h_init.double().numpy(), shape)
    z_l = np.broadcast_to(model.core.l_init.double().numpy(), shape)
    for _ in range(SMALL.halt_max_steps):
        z_h, z_l, logits, q = oracle.step(z_h, z_l, inputs.numpy(), identifiers.numpy())
    prediction = model.predict(inputs, identifiers)
    # Norm and rotation are computed in float32 whatever the type, hence single precision.
    np.testing.assert_allclose(prediction.logits.numpy(), logits, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(prediction.q_halt.numpy(), q, rtol=2e-4, atol=2e-4)


def train_step(model, carry, minimum=None):
    rows = len(carry.steps)
    puzzle = model.puzzles(carry.identifiers)
    minimum = torch.zeros(rows, dtype=torch.int32) if minimum is None else minimum
    return model.core(puzzle, carry.inputs, carry.labels, carry.z_h, carry.z_l, carry.steps, carry.halted, minimum)


def advance(carry, out):
    return carry._replace(z_h=out.z_h, z_l=out.z_l, steps=out.steps, halted=out.halted)


def test_training_steps_carry_their_states_and_equal_a_prediction():
    """Four training steps on rows that may not halt are one prediction of four steps."""
    model = build()
    inputs, labels, identifiers = batch()
    carry = refill_rows(model.empty_carry(4, 5), inputs, labels, identifiers)
    for i in range(4):
        out = train_step(model, carry, minimum=torch.full((4,), 4, dtype=torch.int32))
        carry = advance(carry, out)
        assert out.steps.tolist() == [i + 1] * 4
    assert out.halted.all()
    prediction = model.predict(inputs, identifiers)
    torch.testing.assert_close(out.language, row_cross_entropy(prediction.logits, labels))


def test_only_the_last_outer_cycle_carries_gradient():
    """The gradient is that of one cycle started from the states the earlier cycles left behind."""
    model = build()
    inputs, labels, identifiers = batch()
    carry = refill_rows(model.empty_carry(4, 5), inputs, labels, identifiers)
    train_step(model, carry).loss.backward()
    full = {name: p.grad.clone() for name, p in model.core.named_parameters()}
    model.zero_grad()
    x = model.core.embed_rows(model.puzzles(identifiers), inputs)
    with torch.no_grad():
        z_h, z_l = model.core.run_cycle(*model.core.initial_states(4), x)
    short = build(RecursiveConfig(**{**vars(SMALL), "h_cycles": 1}))
    short.load_state_dict(model.state_dict())
    out = short.core(
        short.puzzles(identifiers), inputs, labels, z_h, z_l, carry.steps, torch.zeros(4, dtype=torch.bool), carry.steps
    )
    out.loss.backward()
    for name, p in short.core.named_parameters():
        torch.testing.assert_close(full[name], p.grad, rtol=1e-4, atol=1e-6)


def test_rows_halt_by_the_head_by_the_limit_and_not_before_their_minimum():
    model = build()
    inputs, labels, identifiers = batch()
    carry = refill_rows(model.empty_carry(4, 5), inputs, labels, identifiers)
    with torch.no_grad():
        model.core.q_head.weight.zero_()
        model.core.q_head.bias.fill_(1.0)  # the head always wants to halt
    out = train_step(model, carry, minimum=torch.tensor([0, 1, 2, 4], dtype=torch.int32))
    assert out.halted.tolist() == [True, True, False, False]
    with torch.no_grad():
        model.core.q_head.bias.fill_(-1.0)  # the head never wants to halt
    late = carry._replace(steps=torch.tensor([3, 2, 3, 2], dtype=torch.int32), halted=torch.zeros(4, dtype=torch.bool))
    assert train_step(model, late).halted.tolist() == [True, False, True, False]


def test_refill_replaces_halted_rows_alone_and_resets_their_states():
    model = build()
    first, second = batch(seed=0), batch(seed=1)
    carry = refill_rows(model.empty_carry(4, 5), *first)
    carry = advance(carry, train_step(model, carry))
    carry = refill_rows(carry._replace(halted=torch.tensor([True, False, True, False])), *second)
    for mixed, old, new in zip((carry.inputs, carry.labels, carry.identifiers), first, second):
        assert torch.equal(mixed[0::2], new[0::2])
        assert torch.equal(mixed[1::2], old[1::2])
    out = train_step(model, carry)
    assert out.steps.tolist() == [1, 2, 1, 2]
    alone = train_step(model, refill_rows(model.empty_carry(4, 5), *second))
    torch.testing.assert_close(out.language[0::2], alone.language[0::2], rtol=1e-6, atol=1e-7)


def test_rows_do_not_see_each_other():
    model = build()
    data = batch()
    together = train_step(model, refill_rows(model.empty_carry(4, 5), *data)).language
    for row in range(4):
        alone = train_step(model, refill_rows(model.empty_carry(1, 5), *(t[row : row + 1] for t in data))).language
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-6)


def test_bfloat16_answers_stay_close_and_weights_stay_float32():
    data = batch()
    exact = build()
    low = build(RecursiveConfig(**{**vars(SMALL), "compute": "bfloat16"}))
    low.load_state_dict(exact.state_dict())
    carry = refill_rows(low.empty_carry(4, 5), *data)
    assert carry.z_h.dtype == torch.bfloat16
    out = train_step(low, carry)
    out.loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in low.core.parameters())
    reference = train_step(exact, refill_rows(exact.empty_carry(4, 5), *data))
    torch.testing.assert_close(out.language, reference.language, rtol=0.05, atol=0.02)


def test_compiled_step_equals_the_eager_one():
    brief = RecursiveConfig(**{**vars(SMALL), "layers": 1, "l_cycles": 1})
    model, other = build(brief), build(brief)
    data = batch()
    eager = train_step(model, refill_rows(model.empty_carry(4, 5), *data))
    eager.loss.backward()
    other.core.compile(backend="aot_eager", fullgraph=True)
    compiled = train_step(other, refill_rows(other.empty_carry(4, 5), *data))
    compiled.loss.backward()
    torch.testing.assert_close(compiled.loss, eager.loss, rtol=1e-6, atol=1e-7)
    for (name, p), q in zip(model.core.named_parameters(), other.core.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=name)


MIXED = [name for name in MIXERS if name != "identity"]


def mixed(mixer, **change):
    return RecursiveConfig(**{**vars(SMALL), "mixer": mixer, "streams": 4, **change})


def copy_sublayers(plain, other):
    """Give a model with hyper-connections the weights of a plain one."""
    state = other.state_dict()
    for name, tensor in plain.state_dict().items():
        state[name.replace("core.network.", "core.network.connections.")] = tensor
    other.load_state_dict(state)


@pytest.mark.parametrize("mixer", list(MIXERS))
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("span", ["call", "recursion"])
def test_every_mixer_starts_as_the_plain_model(mixer, dynamic, span):
    plain, other = build(), build(mixed(mixer, mixer_dynamic=dynamic, stream_span=span))
    copy_sublayers(plain, other)
    data = batch()
    expected = train_step(plain, refill_rows(plain.empty_carry(4, 5), *data))
    out = train_step(other, refill_rows(other.empty_carry(4, 5), *data))
    torch.testing.assert_close(out.language, expected.language, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(out.halting, expected.halting, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("form", ["exact", "paper"])
@pytest.mark.parametrize("mixer", MIXED)
def test_every_mixer_receives_gradient_and_learns_a_batch(mixer, form):
    model = build(mixed(mixer, mixer_form=form, halt_exploration=0.0))
    inputs, labels, identifiers = batch()
    groups = parameter_groups(model.core, 0.1)
    optimiser = AdamAtan2(groups, lr=1e-2)
    losses = []
    carry = refill_rows(model.empty_carry(4, 5), inputs, labels, identifiers)
    for _ in range(50):
        out = train_step(model, carry._replace(halted=torch.ones(4, dtype=torch.bool)))
        optimiser.zero_grad()
        out.loss.backward()
        optimiser.step()
        losses.append(out.language.sum().item())
    assert losses[-1] < 0.8 * losses[0]
    with torch.no_grad():
        x = torch.randn(8, 4, 16)
        for block in model.core.network.connections:
            skip = block.coefficients(x).skip
            assert block.mixer.violation(skip).max() < 5e-2  # iterations cut short leave the set a little
            assert block.map.bias.grad.abs().max() > 0


def test_norm_at_the_end_of_a_call_gives_unit_states():
    model = build(mixed("cayley", stream_norm="call"))
    data = batch()
    out = train_step(model, refill_rows(model.empty_carry(4, 5), *data))
    np.testing.assert_allclose(out.z_h.square().mean(-1).numpy(), 1.0, rtol=1e-3)
    assert model.core.network.connections[0].post_norm is None


def test_layer_norm_after_every_write_has_weights():
    """Fig. jpmhc-block: at the start every stream is centred and of unit size, and the weights are trained."""
    model, plain = build(mixed("cayley", stream_norm="layer", stream_span="recursion")), build(mixed("cayley"))
    dim, count = SMALL.dim, len(model.core.network.connections)
    sizes = [sum(parameter.numel() for parameter in each.parameters()) for each in (model, plain)]
    assert sizes[0] - sizes[1] == 2 * dim * count
    out = train_step(model, refill_rows(model.empty_carry(4, 5), *batch()))
    np.testing.assert_allclose(out.z_h.mean(-1).numpy(), 0.0, atol=1e-5)
    np.testing.assert_allclose(out.z_h.square().mean(-1).numpy(), 1.0, rtol=1e-3)
    out.loss.backward()
    assert all(block.layer_norm.weight.grad.abs().max() > 0 for block in model.core.network.connections)


def test_output_scale_reaches_the_connections():
    model = build(mixed("cayley", mixer_write_scale=0.5))
    assert {block.write_scale for block in model.core.network.connections} == {0.5}


def test_frames_of_the_static_grassmann_model_are_found():
    assert len(grassmann_frames(build(mixed("grassmann", mixer_dynamic=False)))) == 4
    assert not grassmann_frames(build(mixed("grassmann")))


def test_compiled_prediction_equals_the_eager_one(monkeypatch):
    model = build(RecursiveConfig(**{**vars(SMALL), "layers": 1, "l_cycles": 1}))
    inputs, _, identifiers = batch()
    expected = model.predict(inputs, identifiers)
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f: compiler(f, backend="aot_eager", fullgraph=True))
    model.compile_prediction()
    torch.testing.assert_close(model.predict(inputs, identifiers).logits, expected.logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 18}, "multiple"),
        ({"h_cycles": 0}, "h_cycles"),
        ({"halt_exploration": 1.5}, r"halt_exploration must lie in \[0, 1\], got 1.5"),
        ({"mixer": "cayley"}, "streams"),
        ({"mixer": "nope"}, "no mixer is called 'nope'; choose one of identity, unconstrained"),
        ({"mixer": "nope", "streams": 2}, "no mixer is called 'nope'"),
        ({"mixer": "kronecker", "streams": 3}, "power of two"),
        (
            {
                "mixer": "sinkhorn",
                "streams": 2,
                "mixer_gradient": "unrolled",
                "mixer_tolerance": 0.1,
                "kernels": "fused",
            },
            "is not possible: the kernels",
        ),
        ({"mixer": "cayley", "streams": 2, "mixer_temperature": 0.0}, "mixer_temperature must be positive"),
        ({"expansion": 0.0}, "expansion must be positive and finite, got 0"),
        ({"expansion": math.nan}, "expansion must be positive and finite"),
        ({"expansion": 1e-3}, "expansion 0.001 leaves no inner width at dim"),
        ({"inner_multiple": 0}, "inner_multiple must be a whole number, at least 1, got 0"),
        ({"halting_weight": math.nan}, r"halting_weight must lie in \[0, inf\), got nan"),
        ({"halting_weight": -1.0}, r"halting_weight must lie in \[0, inf\), got -1.0"),
    ],
)
def test_bad_configurations_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        RecursiveConfig(**{**vars(SMALL), **change})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("mixer_temperature", 2.0),
        ("mixer_dynamic", False),
        ("mixer_norm", "layer"),
        ("mixer_read", "sigmoid"),
        ("mixer_write", "softmax"),
        ("mixer_write_scale", 0.5),
        ("stream_norm", "call"),
        ("stream_span", "recursion"),
        ("kernels", "reference"),
    ],
)
def test_options_that_the_plain_model_would_ignore_are_refused(option, value):
    with pytest.raises(ValueError, match=f"^{option}={value} has no effect on the plain model"):
        RecursiveConfig(**{**vars(SMALL), option: value})
    RecursiveConfig(**{**vars(SMALL), option: value, "streams": 2})


@pytest.mark.parametrize("attend", ["cudnn", "efficient"])
def test_attention_that_the_cpu_does_not_have(attend):
    config = RecursiveConfig(dim=16, heads=2, attend=attend)
    with pytest.raises(ValueError, match=f"^attend={attend} is not possible on cpu in float32 with heads of width 8"):
        refuse_device(config, torch.device("cpu"))


def test_fused_kernels_need_a_gpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    config = RecursiveConfig(dim=16, heads=2, mixer="cayley", streams=2, kernels="fused")
    with pytest.raises(ValueError, match=r'^kernels="fused" is not possible: the kernels need a CUDA device'):
        refuse_device(config, torch.device("cpu"))


@pytest.mark.parametrize("attend", ["auto", "math", "flash"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_what_the_cpu_has_passes(attend, compute):
    refuse_device(RecursiveConfig(dim=16, heads=2, attend=attend, compute=compute), torch.device("cpu"))
    refuse_device(RecursiveConfig(dim=16, heads=2, mixer="cayley", streams=2, kernels="reference"), torch.device("cpu"))
