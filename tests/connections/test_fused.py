"""Connections on the fused kernels, against the same connections on the reference, and when each is chosen."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

import jpmhc
from jpmhc import mixers
from jpmhc.connections.fused import FusedState, choose_spec
from tests.kernels.connection_cases import FUSED

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIM, N = 16, 4


def block(mixer, index=1, kernels="fused", **options) -> jpmhc.HyperConnection:
    torch.manual_seed(index)
    made = jpmhc.HyperConnection(nn.Linear(DIM, DIM), DIM, N, mixer, index=index, kernels=kernels, **options)
    for parameter in made.map.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return made.to(DEVICE)


def assert_same(model: nn.Module, blocks: list[jpmhc.HyperConnection]) -> None:
    """Output and every gradient, fused against reference."""
    x = torch.randn(3, 2, N, DIM, device=DEVICE, requires_grad=True)
    leaves = [x, *model.parameters()]
    results = []
    for kernels in ("fused", "reference"):
        for each in blocks:
            each.kernels = kernels
        out = model(x)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        results.append((out, *torch.autograd.grad(out, leaves, upstream)))
    for fused, reference in zip(*results):
        assert (fused - reference).norm() <= 1e-5 * reference.norm() + 1e-7


@pytest.mark.parametrize("mixer", [*FUSED, mixers.Grassmann(N, static=True), mixers.Grassmann(N, N)], ids=str)
def test_fused_block_equals_the_reference(mixer):
    made = block(mixer, post_norm="rms" if mixer == "cayley" else None)
    assert_same(made, [made])


@pytest.mark.parametrize("mixer", ["cayley", "grassmann"])
def test_static_coefficients(mixer):
    made = block(mixer, dynamic=False)
    assert_same(made, [made])


def test_stack_with_fused_write_and_read_equals_the_reference():
    blocks = [block(mixer, k) for k, mixer in enumerate(("cayley", "sinkhorn", "permutation"))]
    stack = jpmhc.HyperConnectionStack(blocks)
    assert_same(stack, blocks)
    x = torch.randn(2, N, DIM, device=DEVICE)
    expected = stack(x)
    blocks[1].kernels = "fused"  # fused and reference neighbours
    assert torch.allclose(stack(x), expected, atol=1e-5)
    blocks[0].kernels = "fused"
    assert torch.allclose(stack(x), expected, atol=1e-5)


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("options", [{}, {"post_norm": "rms", "write_scale": 0.5}, {"dynamic": False}], ids=str)
def test_delayed_stack_equals_the_reference(options, reduce):
    blocks = [block(mixer, k, **options) for k, mixer in enumerate(("cayley", "sinkhorn", "rotation"))]
    stack = jpmhc.HyperConnectionStack(blocks, reduce, delayed=True)
    assert_same(stack, blocks)
    x = torch.randn(2, N, DIM, device=DEVICE)
    expected = stack(x)
    for each in blocks[1], blocks[0]:  # fused and reference neighbours
        each.kernels = "fused"
        assert torch.allclose(stack(x), expected, atol=1e-5)
    with torch.no_grad():
        assert torch.allclose(stack(x), expected, atol=1e-5)


@pytest.mark.parametrize(("post_norm", "scale"), [(None, 1.0), ("rms", 1.0), ("layer", 0.5)])
def test_stack_may_return_the_mean(post_norm, scale):
    options = {"post_norm": post_norm, "write_scale": scale}
    blocks = [block(mixer, k, **options) for k, mixer in enumerate(("cayley", "sinkhorn"))]
    stack = jpmhc.HyperConnectionStack(blocks, reduce=True)
    assert_same(stack, blocks)
    x = torch.randn(2, N, DIM, device=DEVICE)
    streams = jpmhc.HyperConnectionStack(blocks)(x)
    for kernels in ("reference", "fused"):
        blocks[1].kernels = kernels
        assert torch.allclose(stack(x), streams.mean(-2), atol=1e-5)


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("result", [None, torch.zeros(2, DIM + 1)], ids=["nothing", "a wrong shape"])
def test_what_a_sublayer_must_return_is_said(result, reduce):
    blocks = [jpmhc.HyperConnection(lambda h: result, DIM, N, index=k, kernels="fused") for k in range(2)]
    for depth in (1, 2):
        stack = jpmhc.HyperConnectionStack(blocks[:depth], reduce).to(DEVICE)
        with pytest.raises(ValueError, match=r"the sublayer must return a tensor of shape \[2, 16\]"):
            stack(torch.randn(2, N, DIM, device=DEVICE))


@pytest.mark.parametrize("kernels", ["fused", "reference"])
@pytest.mark.parametrize("delayed", [False, True])
def test_equal_streams_may_be_given_once(delayed, kernels):
    """The same as n copies, in the result and in the gradient of what was copied."""
    blocks = [block("cayley", 0, kernels, post_norm=None if delayed else "rms"), block("sinkhorn", 1, kernels)]
    stack = jpmhc.HyperConnectionStack(blocks, delayed=delayed)
    upstream = torch.randn(3, 2, N, DIM, device=DEVICE)
    results = []
    for widen in (lambda x: jpmhc.expand_streams(x, N), lambda x: x.unsqueeze(-2)):
        torch.manual_seed(0)
        x = torch.randn(3, 2, DIM, device=DEVICE, requires_grad=True)
        out = stack(widen(x))
        results.append((out, *torch.autograd.grad(out, [x, *stack.parameters()], upstream)))
        assert blocks[0](widen(x)).shape == (3, 2, N, DIM)
        assert blocks[0].coefficients(widen(x)).read.shape == (3, 2, N)
    for copies, once in zip(*results):
        assert (copies - once).norm() <= 1e-5 * copies.norm() + 1e-7


def test_sublayers_in_another_precision_are_brought_to_the_streams():
    made = jpmhc.HyperConnection(lambda h: h.double(), DIM, N, kernels="fused").to(DEVICE)
    out = made(torch.randn(2, N, DIM, device=DEVICE))
    assert out.dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jpmhc.HyperConnection(nn.Identity(), 12, 4, kernels="fused"), "multiple of 8"),
        (lambda: jpmhc.HyperConnection(nn.Identity(), 16, 3, kernels="fused"), "take 2, 4, 8 streams, not 3"),
        (
            lambda: jpmhc.HyperConnection(
                nn.Identity(), 16, 4, mixers.Sinkhorn(4, gradient="unrolled", tolerance=1e-6), kernels="fused"
            ),
            "cannot combine",
        ),
        (lambda: block("cayley")(torch.randn(2, N, DIM, device=DEVICE).double()), "float32, bfloat16 or float16"),
    ],
)
def test_what_cannot_be_fused_is_refused_with_the_reason(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.gpu
def test_auto_takes_the_kernels_on_cuda_and_says_when_it_cannot():
    made = block("cayley", kernels="auto")
    _, state = made.read(torch.randn(2, N, DIM, device=DEVICE))
    assert isinstance(state, FusedState)
    with pytest.warns(UserWarning, match="multiple of 8"):
        jpmhc.HyperConnection(nn.Identity(), 12, 4).to(DEVICE)(torch.randn(2, 4, 12, device=DEVICE))


def test_stack_leaves_to_a_connection_what_is_its_own():
    """Subclasses with their own steps, and hooks."""

    class Silent(jpmhc.HyperConnection):
        def forward(self, x):
            return 0 * super().forward(x)

    x = torch.randn(3, N, DIM, device=DEVICE)
    silent = Silent(nn.Identity(), DIM, N, kernels="fused").to(DEVICE)
    for blocks in ([silent], [block("cayley"), silent]):
        assert not jpmhc.HyperConnectionStack(blocks, reduce=True)(x).any()
    blocks = [block("cayley", k) for k in range(2)]
    stack = jpmhc.HyperConnectionStack(blocks)
    expected = stack(x)
    seen = []
    for each in blocks:
        each.register_forward_hook(lambda module, inputs, output: seen.append(output))
    assert torch.allclose(stack(x), expected, atol=1e-5)
    assert torch.equal(seen[1], stack(x))
    stack = jpmhc.HyperConnectionStack([block("cayley", k) for k in range(2)])
    stack.connections[1].forward = lambda streams: 0 * streams
    assert not stack(x).any()
    del stack.connections[1].forward
    seen.clear()
    handle = register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    stack(x)
    handle.remove()
    assert seen.count(jpmhc.HyperConnection) == 2


def test_mixers_with_a_forward_of_their_own_are_not_taken_for_what_they_inherit():
    class Faster(mixers.Cayley):
        def forward(self, logits):
            return super().forward(5 * logits)

    with pytest.raises(ValueError, match="Faster has a forward of its own"):
        jpmhc.HyperConnection(nn.Identity(), DIM, N, Faster(N), kernels="fused")


@pytest.mark.parametrize("reduce", [False, True])
def test_activation_checkpointing(reduce):
    stack = jpmhc.HyperConnectionStack([block("cayley", 0), block("sinkhorn", 1)], reduce)
    results = []
    for run in (stack, lambda x: checkpoint(stack, x, use_reentrant=False)):
        torch.manual_seed(0)
        x = torch.randn(3, N, DIM, device=DEVICE, requires_grad=True)
        results.append(torch.autograd.grad(run(x).square().sum(), [x, *stack.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_what_only_the_reference_does_is_said():
    made = block("cayley")
    x = torch.randn(3, N, DIM, device=DEVICE, requires_grad=True)
    (gradient,) = torch.autograd.grad(made(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match='no second derivatives; kernels="reference" does'):
        torch.autograd.grad(gradient.sum(), x)
    with forward_ad.dual_level(), pytest.raises(ValueError, match="forward-mode derivatives"):
        made(forward_ad.make_dual(x, x))
    with pytest.raises(ValueError, match=r"coefficients must be float32, they are torch\.float64"):
        made.double()(x)


def test_static_coefficients_have_no_weight_that_could_be_too_large():
    kinds = {"read": "softmax_matrix", "write": "softmax_matrix"}
    made = jpmhc.HyperConnection(nn.Identity(), DIM, 8, "sinkhorn", dynamic=False, kernels="fused", **kinds).to(DEVICE)
    x = torch.randn(2, 8, DIM, device=DEVICE)
    fused, made.kernels = made(x), "reference"
    assert torch.allclose(fused, made(x), atol=1e-5)


def test_compiles_with_variable_sizes_and_settings():
    """dynamic=True, and blocks whose settings differ: the compiler takes such numbers for variable."""
    torch.compiler.reset()  # other tests' compilations of the same code count towards its limit
    for temperature in (1.0, 0.5, 2.0):
        made = block("cayley", temperature=temperature)
        compiled = torch.compile(made, fullgraph=True, backend="aot_eager", dynamic=True)
        for tokens in (5, 1):
            x = torch.randn(tokens, N, DIM, device=DEVICE)
            assert torch.allclose(compiled(x), made(x), atol=1e-6)


def test_parameters_on_another_device_than_the_streams_are_named():
    block = jpmhc.HyperConnection(None, 16, 4, kernels="fused")  # on the CPU
    with pytest.raises(ValueError, match="the connection is on cpu and its streams are on cuda"):
        choose_spec(block, "cuda", torch.bfloat16)


@pytest.mark.interpreter
def test_what_ran_in_the_interpreter_is_refused_without_it(monkeypatch):
    block, x = jpmhc.HyperConnection(None, 16, 4, kernels="fused"), torch.zeros(2, 4, 16)
    block.read(x)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="need a CUDA device"):
        block.read(x)
