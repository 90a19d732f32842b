"""What wrap refuses, in one sentence, leaving the model as it was."""

import re
import types

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import jpmhc
from tests.own import Shrinking
from tests.wrap.models import Block, Stack

X = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(3))


class WithoutAdditions(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norms[0](x))


class Convolution(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mix = nn.Conv1d(6, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x)


class Losing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return (x + self.mix(x)).exp()


class Choosing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x) if isinstance(x, Tensor) else x.no_such_thing


class Detaching(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad


class LosingGradients(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(Detaching.apply(x))


class Residual(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ones(2, 6, 12)


def refused(model: nn.Module, said: str, hooks: bool = False, **options) -> None:
    names = list(model.state_dict())
    with pytest.raises(ValueError, match=said) as refusal:
        jpmhc.wrap(model, **{"inputs": X, **options})
    assert "\n" not in str(refusal.value)
    assert list(model.state_dict()) == names
    assert hooks or not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (
            WithoutAdditions,
            r"Stack has no layer .* blocks\.0 \(WithoutAdditions\) has none",
        ),
        (Convolution, r"blocks\.0 \(Convolution\) calls conv1d on its hidden state, whose last dimension is not its"),
        (Losing, r"blocks\.0 \(Losing\) returns something that the additions to its hidden state do not lead to"),
        (Choosing, r"blocks\.0 \(Choosing\) raises AttributeError when its hidden state is followed"),
        (LosingGradients, "Stack cannot be wrapped: its gradients would differ"),
    ],
)
def test_layers_that_cannot_be_followed(block, said):
    refused(Stack(block(12) for _ in range(2)), said)


def test_one_bad_layer_among_good_ones():
    refused(Stack([Block(12), Losing(12), Block(12)]), r"blocks\.1 \(Losing\) returns something")


def test_layers_of_different_width():
    class Widening(Stack):
        def __init__(self) -> None:
            super().__init__([Block(12), Block(24)])
            self.between, self.head = nn.Linear(12, 24), nn.Linear(24, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.blocks[1](self.between(self.blocks[0](self.embed(x)))))

    said = r"blocks\.1 \(Block\)( cannot be wrapped: it)? has a hidden state of width 24 and blocks\.0 one of width 12"
    refused(Widening(), said)
    model = Widening()
    refused(model, said, layers=model.blocks)


def test_layers_that_the_inputs_do_not_reach():
    class Leaving(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.blocks[0](self.embed(x)))

    refused(
        Leaving(Block(12) for _ in range(2)), r"blocks\.1 \(Block\) cannot be wrapped: these inputs do not reach it"
    )


def test_layers_that_are_called_without_gradients():
    class Hidden(Stack):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.blocks[1](self.blocks[0](self.embed(x)))
            return self.head(x)

    refused(Hidden(Block(12) for _ in range(2)), r"blocks\.0 cannot be wrapped: it is called where no gradients are")


def test_layers_that_are_skipped_in_training():
    model = Stack(Block(12) for _ in range(2))
    model.layerdrop = 0.1
    refused(model, r"the model \(Stack\) skips whole layers in training, .* set its layerdrop from 0.1 to 0")
    model.layerdrop, model.config = 0, types.SimpleNamespace(layerdrop=0.2)
    refused(model, r"set layerdrop in its config from 0.2 to 0")


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_model_that_is_spread_over_processes_already(one_process):
    refused(DistributedDataParallel(Stack([Block(12)])), r"the model \(Distr.*\) is in DistributedDataParallel already")
    sharded = FullyShardedDataParallel(Stack([Block(12)]), use_orig_params=True, device_id=torch.device("cpu"))
    refused(sharded, r"the model \(FullyShardedDataParallel\) is in FSDP already")
    model = Stack([Block(12)])
    fully_shard(model.blocks[0])
    refused(model, r"blocks\.0 \(FSDPBlock\) is in FSDP already, .*: wrap the plain model first", hooks=True)
    assert not any("hyper_connections" in name for name in model.state_dict())


def test_a_model_inside_another_that_is_spread_over_processes_already(one_process):
    outer = DistributedDataParallel(nn.Sequential(Stack([Block(12)])))
    refused(outer.module[0], r"the model \(Distr.*\) is in DistributedDataParallel already, .*: wrap the plain model")
    del outer
    jpmhc.wrap(Stack([Block(12)]), inputs=X)


def test_a_sharded_model_is_not_unwrapped_or_diagnosed(one_process):
    model = jpmhc.wrap(Stack([Block(12)]), inputs=X)
    fully_shard(model)
    for refuse in (lambda: jpmhc.unwrap(model), lambda: jpmhc.diagnose(model, X, say=None)):
        with pytest.raises(ValueError, match=r"the weights (of this \w+ )?are spread over processes: gather"):
            refuse()


def test_a_model_that_is_compiled_already():
    refused(torch.compile(Stack([Block(12)]), backend="eager"), "the model is compiled already: wrap the plain model")
    inner = nn.Sequential(Stack([Block(12)]))
    inner[0].compile(backend="eager")
    refused(inner, "^0 is compiled already: wrap the plain model first")
    model = Stack([Block(12)])
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    refused(model, r"blocks\.0 is compiled already")


def test_an_addition_that_is_a_module_of_its_own_is_no_layer():
    model = Stack([Residual(), Residual()])
    refused(model, "blocks.0 .* only adds to it: the module that calls it is the layer", layers=model.blocks)


class Halving(Shrinking):
    """A mixer that loses half of every stream."""

    def forward(self, logits: Tensor) -> Tensor:
        return super().forward(logits) / 2


@pytest.mark.parametrize(
    ("mixer", "said"),
    [
        (Halving(4), "Halving starts from has rows whose sums .* by up to 0.5"),
        (Shrinking(2), "the mixer is for 2 streams, the connection has 4"),
    ],
)
def test_a_mixer_that_does_not_fit(mixer, said):
    refused(Stack(Block(12) for _ in range(2)), said, mixer=mixer)


def test_a_wrapped_model():
    model = jpmhc.wrap(Stack([Block(12)]), inputs=X)
    with pytest.raises(ValueError, match=r"blocks\.0 is wrapped already"):
        jpmhc.wrap(model, inputs=X)


def test_a_model_with_hyper_connections():
    model = jpmhc.HyperConnectionStack([jpmhc.HyperConnection(nn.Linear(12, 12), 12)], expand=True, reduce=True)
    refused(model, "this HyperConnectionStack has hyper-connections already")


def test_a_model_that_is_not_wrapped():
    with pytest.raises(ValueError, match="this Stack is not wrapped"):
        jpmhc.unwrap(Stack([Block(12)]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"inputs": None}, "cannot guess what Stack is called with: give inputs="),
        ({"inputs": 3}, "inputs must be a tensor, a tuple of arguments or a dict of them, got int"),
        ({"layers": [nn.Linear(2, 2)]}, "layers must be modules of the model, got a Linear"),
        ({"layers": 3}, "layers must be modules of the model, got 3"),
        ({"layers": []}, "layers must have at least one module"),
        ({"mixer": "blender"}, "no mixer is called 'blender'"),
        ({"streams": 0}, "streams must be"),
        ({"post_norm": "rms"}, "no option of wrap is called 'post_norm'; choose one of norm, read, write"),
        ({"index": 3}, "no option of wrap is called 'index'"),
        ({"temprature": 2.0}, "no option of wrap is called 'temprature'"),
    ],
)
def test_bad_arguments(options, said):
    refused(Stack(Block(12) for _ in range(2)), said, **options)


def test_a_model_that_needs_more_than_was_guessed_is_left_as_it_was():
    class Pictures(Stack):
        main_input_name, config = "input_ids", types.SimpleNamespace(vocab_size=8)

        def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> Tensor:
            return super().forward(pixel_values.float())  # type: ignore[union-attr]

    model = Pictures([Block(12)])
    torch.manual_seed(5)
    wanted = torch.randn(3)
    torch.manual_seed(5)
    said = r"Pictures cannot be called with input_ids alone, which was guessed \(AttributeError: .*\): give inputs="
    with pytest.raises(ValueError, match=said):
        jpmhc.wrap(model)
    assert model.training
    assert torch.equal(torch.randn(3), wanted)


def test_what_is_no_model():
    with pytest.raises(ValueError, match=re.escape("the model must be a torch.nn.Module, got list")):
        jpmhc.wrap([Block(12)])


def test_a_model_without_numbers():
    with torch.device("meta"):
        model = Stack(Block(12) for _ in range(2))
    refused(model, r"embed\.weight is on the meta device, without numbers: load the weights before")


def test_a_layer_that_adds_nothing_later_is_an_error():
    class Resting(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x if self.training else x + self.mix(x)

    model = jpmhc.wrap(Stack(Resting(12) for _ in range(2)).eval(), inputs=X)
    with pytest.raises(RuntimeError, match="its hidden state went through nothing, not add"):
        model.train()(X)


def test_a_layer_that_computes_differently_later_is_an_error():
    class Moody(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.mix(x)
            return x if self.training else x + self.mlp(x)

    model = jpmhc.wrap(Stack(Moody(12) for _ in range(2)).eval(), inputs=X)
    model(X)
    with pytest.raises(
        RuntimeError, match=r"blocks\.0 \(Moody\) did not compute as when it was wrapped: .* add, not add, add"
    ):
        model.train()(X)


def test_a_skipped_layer_is_an_error():
    model = jpmhc.wrap(Stack(Block(12) for _ in range(2)), inputs=X)
    with pytest.raises(RuntimeError, match=r"blocks\.1: expected the 4 streams of the layer before it"):
        model.blocks[1](torch.randn(2, 4, 12))


def test_layers_that_are_left_out_at_the_end_are_an_error():
    """The streams would leave the model in the place of its hidden state."""
    torch.manual_seed(0)
    model = jpmhc.wrap(Stack(Block(12) for _ in range(3)), inputs=X)
    model.head = nn.Identity()
    model(X)
    model.blocks = model.blocks[:2]
    with pytest.raises(
        RuntimeError, match=r"Stack did not call all of its layers blocks.0 to blocks.2, as it did when the model was"
    ):
        model(X)


def test_what_cannot_be_unwrapped_loaded_or_made_a_stage():
    with pytest.raises(ValueError, match="no layers of a wrapped model"):
        jpmhc.prepare_stage(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="this int is not wrapped"):
        jpmhc.unwrap(3)
    with pytest.raises(ValueError, match=r"takes a class such as AutoModelForCausalLM and then a folder, got 'there'"):
        jpmhc.load_wrapped("there", Stack)
    with pytest.raises(ValueError, match="load_wrapped takes no streams=: the saved configuration says how"):
        jpmhc.load_wrapped(types.SimpleNamespace(from_pretrained=None), "there", streams=2)


class Overflowing(Stack):
    """A model with one more NaN in its outputs at each call, as where numbers overflow or not by their rounding."""

    calls = 0

    def forward(self, *args):
        y = super().forward(*args)
        self.calls += 1
        return y.masked_fill(torch.arange(y.shape[-1]) < self.calls, torch.nan)


def test_a_model_whose_outputs_are_nan_is_not_blamed_on_its_layers():
    refused(Overflowing(Block(12) for _ in range(2)), "outputs are NaN for these inputs: give its weights values, or")
