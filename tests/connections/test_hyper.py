"""HyperConnection against the formula written out token by token, and what it promises its users."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import jpmhc
from jpmhc.connections import gates, reference
from tests.connections.blocks import DIM, N, perturbed

NAMES = list(jpmhc.MIXERS)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("gate", ["softmax", "softmax_matrix", "sigmoid"])
def test_block_is_the_papers_formula(norm, gate):
    block = perturbed(mixer="cayley", norm=norm, read=gate, write=gate, temperature=0.7)
    x = torch.randn(2, 3, N, DIM, dtype=torch.float64)
    out = block(x)
    normalise = nn.functional.rms_norm if norm == "rms" else nn.functional.layer_norm
    for token, found in zip(x.reshape(-1, N, DIM), out.reshape(-1, N, DIM)):
        flat = normalise(token.flatten(), (N * DIM,), eps=1e-6)
        logits = block.map.weight @ flat / (N * DIM) ** 0.5 + block.map.bias
        size = gates.READS[gate].size(N)
        pre, post, res = logits[:size] / 0.7, logits[size : 2 * size] / 0.7, logits[2 * size :]
        if gate == "softmax_matrix":
            h = (pre.view(N, N).softmax(-1) @ token).mean(0)
            spread = post.view(N, N).softmax(-2) @ block.sublayer(h).expand(N, DIM)
        else:
            read, write = (
                (pre.softmax(-1), N * post.softmax(-1)) if gate == "softmax" else (pre.sigmoid(), 2 * post.sigmoid())
            )
            spread = write[:, None] * block.sublayer(read @ token)
        k = torch.zeros(N, N, dtype=torch.float64)
        k[*torch.triu_indices(N, N, 1)] = 0.05 * res
        k = k - k.T
        skip = (torch.eye(N) + k) @ torch.linalg.inv(torch.eye(N) - k)
        assert torch.allclose(found, skip @ token + spread, atol=1e-12)


@pytest.mark.parametrize("delayed", [False, True])
def test_output_scale_and_layer_norm_are_the_papers(delayed):
    """Eq. cayley-fwd4 and fig. jpmhc-block: s multiplies the writes, and a layer norm with weights follows the sum."""
    block, x = perturbed(post_norm="layer", write_scale=0.3), torch.randn(3, N, DIM, dtype=torch.float64)
    plain = perturbed()
    plain.load_state_dict({key: value for key, value in block.state_dict().items() if "layer_norm" not in key})
    with torch.no_grad():
        block.layer_norm.weight.normal_()
        block.layer_norm.bias.normal_()
    read, write, skip = plain.coefficients(x)
    torch.testing.assert_close(block.coefficients(x).write, 0.3 * write)
    h = x[:, 0] if delayed else (read.unsqueeze(-1) * x).sum(-2)
    raw = skip @ x + 0.3 * write.unsqueeze(-1) * block.sublayer(h).unsqueeze(-2)
    centred = raw - raw.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = normed * block.layer_norm.weight + block.layer_norm.bias
    found = jpmhc.HyperConnectionStack([block], delayed=delayed)(x) if delayed else block(x)
    torch.testing.assert_close(found, expected)
    h, state = block.read(x)
    if not delayed:
        torch.testing.assert_close(block.write_mean(x, block.sublayer(h), state), expected.mean(-2))


@pytest.mark.parametrize(("name", "post_norm"), [*((name, None) for name in NAMES), ("cayley", "rms")])
def test_compiled_equals_eager(name, post_norm):
    torch.compiler.reset()  # other mixers' compilations of the same code count towards its limit
    block = perturbed(mixer=name, post_norm=post_norm)
    x = torch.randn(5, N, DIM, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    leaves = [x, *(p for p in block.parameters() if p.requires_grad)]
    results = [torch.autograd.grad(f(x).sin().sum(), leaves, allow_unused=True) for f in (block, compiled)]
    for eager, other in zip(*results):
        assert eager is None or torch.allclose(eager, other, atol=1e-12)


def test_function_transforms_see_the_same_block():
    block = perturbed(mixer="sinkhorn")
    x = torch.randn(5, N, DIM, dtype=torch.float64)
    assert torch.allclose(torch.func.vmap(block)(x[:, None])[:, 0], block(x))
    reverse, forward = torch.func.jacrev(block)(x[:1]), torch.func.jacfwd(block)(x[:1])
    assert torch.allclose(reverse, forward, atol=1e-12)


def test_half_precision_streams_keep_full_precision_coefficients():
    x, y = torch.randn(3, N, DIM).bfloat16(), torch.randn(3, DIM).bfloat16()
    write, skip = torch.rand(3, N), torch.randn(3, N, N)
    out = reference.scatter(x, y, write, skip)
    exact = skip @ x.float() + write.unsqueeze(-1) * y.float().unsqueeze(1)
    assert reference.gather(x, write).dtype == out.dtype == torch.bfloat16
    assert torch.allclose(out.float(), exact, rtol=2**-7, atol=1e-6)  # one rounding to bfloat16, no more


def test_steps_compose_to_forward_and_coefficients_describe_them():
    block = perturbed(mixer="permutation")
    x = torch.randn(3, N, DIM, dtype=torch.float64)
    h, state = block.read(x)
    y = block.sublayer(h)
    out = block.write(x, y, state)
    assert torch.equal(out, block(x))
    c = block.coefficients(x)
    assert torch.allclose(h, torch.einsum("tn,tnd->td", c.read, x))
    assert torch.allclose(out, c.skip @ x + c.write[..., None] * y[:, None])
    # write() takes other streams than the ones that were read
    assert torch.allclose(block.write(2 * x, y, state), c.skip @ (2 * x) + c.write[..., None] * y[:, None])


def test_extra_arguments_and_tuples_pass_through():
    def sublayer(h, shift, *, scale):
        return h * scale + shift, "weights", 7

    block = jpmhc.HyperConnection(sublayer, DIM, N, index=0)
    x = torch.randn(3, DIM)
    out, label, number = block(jpmhc.expand_streams(x, N), 1.0, scale=2.0)
    assert (label, number) == ("weights", 7)
    assert torch.allclose(jpmhc.reduce_streams(out), x + 2 * x + 1, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_any_dtype_and_layout(dtype):
    block = jpmhc.HyperConnection(nn.Linear(DIM, DIM), DIM, N, index=0).to(dtype)
    x = torch.randn(DIM, 3, N, 2, dtype=dtype).permute(3, 1, 2, 0)
    assert not x.is_contiguous()
    out = block(x)
    assert out.dtype == dtype
    assert torch.equal(out, block(x.contiguous()))
    assert block(x[:0]).shape == (0, 3, N, DIM)
    assert block(x[0, 0]).shape == (N, DIM)


def test_sublayers_may_begin_in_place():
    block = jpmhc.HyperConnection(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(DIM, DIM)), DIM, N, index=0)
    other = jpmhc.HyperConnection(nn.Sequential(nn.ReLU(), nn.Linear(DIM, DIM)), DIM, N, index=0)
    other.load_state_dict(block.state_dict())
    x = torch.randn(3, N, DIM, requires_grad=True)
    results = [torch.autograd.grad(b(x).square().sum(), [x, *b.parameters()]) for b in (block, other)]
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_post_norm_gives_each_stream_unit_mean_square():
    block = perturbed(mixer="cayley", post_norm="rms")
    out = block(5 * torch.randn(3, N, DIM, dtype=torch.float64))
    assert torch.allclose(out.square().mean(-1), torch.ones(3, N, dtype=torch.float64), atol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jpmhc.HyperConnection(nn.Identity(), DIM, N, "birkhof"), "no mixer is called 'birkhof'"),
        (lambda: jpmhc.HyperConnection(nn.Identity(), DIM, 3, "kronecker"), "power of two"),
        (lambda: jpmhc.HyperConnection(nn.Identity(), 0, N), "dim must be a whole number, at least 1"),
        (lambda: jpmhc.HyperConnection(nn.Identity(), DIM, 0), "streams must be a whole number, at least 1"),
        (lambda: jpmhc.HyperConnection(nn.Identity(), DIM, N, norm="batch"), "no norm is called 'batch'"),
        (lambda: jpmhc.HyperConnection(nn.Identity(), DIM, N, read="max"), "no read is called 'max'"),
        (lambda: jpmhc.HyperConnection(nn.Identity(), DIM, N, write="max"), "no write is called 'max'"),
        (lambda: jpmhc.HyperConnection(nn.Identity(), DIM, N, temperature=float("inf")), "positive and finite"),
        (lambda: jpmhc.HyperConnection("attention", DIM, N), "a module, a function or None, got 'attention'"),
        (lambda: jpmhc.HyperConnection(None, DIM, N)(torch.zeros(2, N, DIM)), "made without a sublayer"),
        (lambda: jpmhc.HyperConnection(nn.Identity(), DIM, N, index=1.5), "index must be a whole number"),
        (lambda: jpmhc.HyperConnection(nn.Identity(), 8.0, N), "dim must be a whole number"),
        (lambda: jpmhc.HyperConnection(nn.Identity(), DIM, N, nn.Linear(2, 2)), "a name .* or a Mixer"),
        (lambda: jpmhc.HyperConnection(lambda h: [h], DIM, N)(torch.zeros(2, N, DIM)), "got list"),
        (lambda: jpmhc.HyperConnection(nn.Identity(), DIM, N)(torch.zeros(2, N, DIM).long()), "floating-point streams"),
        (lambda: jpmhc.HyperConnection(nn.Identity(), DIM, N, post_norm="batch"), "post_norm"),
        (lambda: jpmhc.HyperConnection(nn.Identity(), DIM, N, kernels="cuda"), "no kind of kernels is called 'cuda'"),
        (
            lambda: jpmhc.HyperConnection(nn.Identity(), DIM, N)(torch.zeros(N + 1, DIM)),
            r"\[\.\.\., 4, 8\], got \[5, 8\]",
        ),
        (lambda: jpmhc.HyperConnection(nn.Linear(DIM, 3), DIM, N)(torch.zeros(2, N, DIM)), r"8\], got \[2, 3\]"),
        (lambda: jpmhc.HyperConnection(nn.Identity(), True), "dim must be a whole number"),
        (lambda: jpmhc.HyperConnection(nn.Identity(), DIM, N, dtype=torch.int32), "dtype must be one of"),
        (lambda: jpmhc.HyperConnection(nn.Identity(), DIM, N, index=True), "index must be a whole number"),
        (lambda: setattr(jpmhc.HyperConnection(None, DIM), "kernels", "Fused"), "no kind of kernels is called 'Fused'"),
        (lambda: setattr(jpmhc.HyperConnection(None, DIM), "post_norm", "layer"), "from None to 'layer'"),
        (lambda: setattr(jpmhc.HyperConnection(None, DIM, post_norm="layer"), "post_norm", None), "from 'layer' to"),
        (lambda: jpmhc.HyperConnectionStack(5), "a list of HyperConnections, got one int"),
        (lambda: jpmhc.HyperConnectionStack([5]), "made of HyperConnections, got int"),
        (lambda: jpmhc.reduce_streams([1]), "got list"),
        (lambda: jpmhc.reduce_streams(torch.zeros(2, 3).long()), "floating-point streams"),
        (lambda: jpmhc.shard_connections(5), "a module with hyper-connections, got int"),
        (lambda: jpmhc.HyperConnection(nn.Identity(), DIM, True), "streams must be a whole number"),
        (lambda: jpmhc.HyperConnection(nn.Identity(), DIM, dynamic="no"), "dynamic must be True or False"),
        (lambda: jpmhc.HyperConnection(nn.Identity(), DIM, temperature="1"), "temperature must be positive"),
        (lambda: jpmhc.HyperConnection(nn.Identity(), DIM, read=["softmax"]), "no read is called"),
        (lambda: jpmhc.HyperConnection(nn.Identity(), DIM)(None), "expected streams of shape .* got NoneType"),
        (
            lambda: jpmhc.HyperConnection(nn.Identity(), DIM)(torch.ones(2, DIM)),
            r"expand_streams\(x, 4\) makes streams",
        ),
        (lambda: jpmhc.HyperConnection(lambda h: h.int(), DIM, N)(torch.randn(2, N, DIM)), "floating-point numbers"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("mixer", ["identity", "cayley"])
def test_gradients_are_not_written_into_when_the_sublayer_has_another_type(mixer):
    """Autocast: streams in float32, the sublayer's output in bfloat16."""
    torch.manual_seed(0)
    made = jpmhc.HyperConnection(nn.Linear(DIM, DIM), DIM, N, mixer, index=0)
    x = torch.randn(5, N, DIM, requires_grad=True)
    upstream = torch.randn(5, N, DIM)
    kept = upstream.clone()
    with torch.autocast("cpu", torch.bfloat16):
        out = made(x)
    (found,) = torch.autograd.grad(out, x, upstream)
    assert torch.equal(upstream, kept)
    (expected,) = torch.autograd.grad(made(x), x, upstream)
    assert (found - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.parametrize("mixer", ["identity", "cayley"])
def test_gradients_of_others_are_left_alone_when_only_the_write_is_compiled(mixer):
    torch.compiler.reset()
    made = jpmhc.HyperConnection(nn.Linear(DIM, DIM), DIM, N, mixer, index=0)
    write = torch.compile(made.write, backend="aot_eager")
    x = torch.randn(2, N, DIM, requires_grad=True)
    other = torch.ones(2, N, DIM, requires_grad=True)
    side = other * 1.0
    weights = torch.randn(2, N, DIM)
    h, state = made.read(x)
    ((write(x, made.sublayer(h), state) + side) * weights).sum().backward()
    assert torch.equal(other.grad, weights)
    (expected,) = torch.autograd.grad((made(x) * weights).sum(), x)
    assert torch.allclose(x.grad, expected, atol=1e-6)


def test_selective_checkpointing_may_keep_matrix_products():
    made = jpmhc.HyperConnection(nn.Linear(DIM, DIM), DIM, N, norm="layer", index=0)
    x = torch.randn(3, N, DIM, requires_grad=True)
    kept = [torch.ops.aten.bmm.default, torch.ops.aten.mm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)
    out = checkpoint(made, x, use_reentrant=False, context_fn=contexts)
    (found,) = torch.autograd.grad(out.square().sum(), x)
    (expected,) = torch.autograd.grad(made(x).square().sum(), x)
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("kernels", ["reference", "fused"])
def test_write_takes_only_what_fits_the_read(kernels):
    made, narrow = (jpmhc.HyperConnection(nn.Identity(), DIM, n, index=0, kernels=kernels).to(DEVICE) for n in (N, 2))
    x = torch.randn(2, 3, N, DIM, device=DEVICE)
    h, state = made.read(x)
    for streams, y, read, message in (
        (x[..., :3, :], h, state, r"expected streams of shape \[..., 4, 8\]"),
        (x.int(), h, state, "floating-point streams"),
        (x, h, None, "must be what this connection's read returned, got NoneType"),
        (x.transpose(0, 1), h.transpose(0, 1), state, "read returned for these streams"),
        (x.repeat(2, 1, 1, 1), h.repeat(2, 1, 1), state, "read returned for these streams"),
        (x, h, narrow.read(x[..., :2, :])[1], "read returned for these streams"),
        (x, h, made.read(x[:1, :1])[1], "read returned for these streams"),
    ):
        with pytest.raises(ValueError, match=message):
            made.write(streams, y, read)


@pytest.mark.parametrize("kernels", ["reference", "fused"])
def test_settings_may_change_and_nothing_goes_stale(kernels):
    def make(**options):
        torch.manual_seed(0)
        options = {"post_norm": None, "temperature": 1.0} | options
        block = jpmhc.HyperConnection(nn.Identity(), DIM, N, index=0, kernels=kernels, **options)
        nn.init.normal_(block.map.weight)
        return block.to(DEVICE)

    x = torch.randn(2, N, DIM, device=DEVICE)
    changed = make()
    compiled = torch.compile(changed, backend="aot_eager")
    compiled(x)
    changed.post_norm = "rms"
    changed.map.temperature = 2.0
    made = make(post_norm="rms", temperature=2.0)
    made.map.load_state_dict(changed.map.state_dict())
    for run in (changed, compiled):
        assert torch.allclose(run(x), made(x), atol=1e-6)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(changed)))
    assert torch.equal(copied(x), changed(x))


def test_nan_reaches_its_own_token_alone():
    for name in NAMES:
        block = perturbed(mixer=name)
        x = torch.randn(3, N, DIM, dtype=torch.float64)
        x[1, 0, 0] = float("nan")
        assert block(x).isnan().flatten(1).any(1).tolist() == [False, True, False], name


def test_a_connection_without_a_sublayer_reads_and_writes():
    block, bare = (jpmhc.HyperConnection(f, DIM, N, index=1) for f in (torch.tanh, None))
    x = torch.randn(3, N, DIM)
    h, state = bare.read(x)
    assert torch.equal(bare.write(x, h.tanh(), state), block(x))
    mean = bare.write_mean(x, h.tanh(), state)
    assert torch.allclose(mean, block(x).mean(-2), atol=1e-6)
    following = jpmhc.HyperConnection(None, DIM, N, "sinkhorn", index=2)
    between, h, state = bare.write_read(x, h.tanh(), state, following)
    assert torch.equal(between, block(x))
    assert torch.equal(h, following.read(between)[0])
