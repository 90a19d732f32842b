"""Models of plain PyTorch: equal outputs, and the arithmetic of hyper-connections once they are trained."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import jpmhc
from jpmhc.wrap.layers import wrapped_layers
from tests.wrap.models import Block, PostNormBlock, RootMeanSquare, Stack, difference, disturb, wrapped_copy

EXACT = 1e-12


@pytest.fixture(autouse=True)
def _double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def inputs() -> Tensor:
    return torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(3))


def connections_of(model: nn.Module) -> list[list[jpmhc.HyperConnection]]:
    return [list(held.additions) for held in wrapped_layers(model).values()]


def around(connection: jpmhc.HyperConnection, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    h, state = connection.read(x)
    return connection.write(x, sublayer(h), state)


def test_a_fresh_wrapped_model_computes_the_same():
    model = Stack(Block(12) for _ in range(3))
    before = model(inputs())
    assert jpmhc.wrap(model, inputs=inputs()) is model
    assert difference(before, model(inputs())) < EXACT
    assert [len(found) for found in connections_of(model)] == [2, 2, 2]


def test_a_trained_wrapped_model_is_what_its_connections_say():
    model = disturb(jpmhc.wrap(Stack(Block(12) for _ in range(3)), streams=3, mixer="sinkhorn", inputs=inputs()))
    x = jpmhc.expand_streams(model.embed(inputs()), 3)
    for block, (first, second) in zip(model.blocks, connections_of(model)):
        x = around(first, x, lambda h, block=block: block.mix(block.norms[0](h)).roll(1, -2))
        x = around(second, x, lambda h, block=block: block.mlp(block.norms[1](h)))
    assert difference(model.head(jpmhc.reduce_streams(x)), model(inputs())) < EXACT


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, RootMeanSquare])
def test_post_norm_normalises_each_stream(norm):
    model = disturb(jpmhc.wrap(Stack(PostNormBlock(12, norm) for _ in range(2)), inputs=inputs()))
    x = jpmhc.expand_streams(model.embed(inputs()), 4)
    for block, (first, second) in zip(model.blocks, connections_of(model)):
        x = block.first(around(first, x, lambda h, block=block: block.mix(h).roll(1, -2)))
        x = block.second(around(second, x, lambda h, block=block: block.mlp(h).tanh()))
    assert difference(model.head(jpmhc.reduce_streams(x)), model(inputs())) < EXACT


def test_gradients_are_those_of_the_plain_model():
    plain = Stack(Block(12) for _ in range(2))
    model = wrapped_copy(plain, inputs=inputs())
    for one in (plain, model):
        one(inputs()).square().sum().backward()
    for name, parameter in plain.named_parameters():
        assert difference(parameter.grad, model.get_parameter(name).grad) < EXACT
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layers_of_pytorch(norm_first):
    layer = nn.TransformerEncoderLayer(12, 2, 24, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    x = torch.randn(2, 6, 12)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    wrapped = wrapped_copy(model, inputs=x)
    assert difference(model(x, mask=mask), wrapped(x, mask=mask)) < EXACT
    assert [len(found) for found in connections_of(wrapped)] == [2, 2, 2]


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_and_decoder_of_pytorch(norm_first):
    model = nn.Transformer(12, 2, 2, 2, 24, batch_first=True, norm_first=norm_first).eval()
    x, y = torch.randn(2, 6, 12), torch.randn(2, 4, 12)
    wrapped = wrapped_copy(model, inputs=(x, y))
    assert difference(model(x, y), wrapped(x, y)) < EXACT
    assert [len(found) for found in connections_of(wrapped)] == [2, 2, 3, 3]


def test_layers_that_are_no_list_are_found():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.above = Block(5), Block(5)

        def forward(self, x: Tensor) -> Tensor:
            return self.above(self.below(x))

    model = Two()
    wrapped = wrapped_copy(model, inputs=inputs())
    assert list(wrapped_layers(wrapped)) == ["below", "above"]
    assert difference(model(inputs()), wrapped(inputs())) < EXACT


def test_connections_that_were_made_in_inference_mode_are_trained():
    model, x = Stack([Block(12)]), torch.randn(2, 6, 5)
    with torch.inference_mode():
        jpmhc.wrap(model, inputs=x)
    model(x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.blocks[0].hyper_connections.parameters())


def test_a_model_that_is_one_layer():
    layer = nn.TransformerEncoderLayer(12, 2, 24, batch_first=True, norm_first=True).eval()
    x = torch.randn(2, 6, 12)
    before = layer(x)
    assert difference(before, jpmhc.wrap(layer, inputs=x)(x)) < EXACT
    assert [len(found) for found in connections_of(layer)] == [2]
    assert difference(before, jpmhc.unwrap(layer)(x)) < EXACT


def test_only_the_given_layers_are_wrapped():
    model = Stack(Block(12) for _ in range(4))
    before = model(inputs())
    jpmhc.wrap(model, inputs=inputs(), layers=[model.blocks[0], model.blocks[1], model.blocks[3]])
    assert list(wrapped_layers(model)) == ["blocks.0", "blocks.1", "blocks.3"]
    plans = [held.plan for held in wrapped_layers(model).values()]
    assert [(plan.first, plan.last) for plan in plans] == [(True, False), (False, True), (True, True)]
    assert difference(before, model(inputs())) < EXACT


def test_a_parallel_block_has_one_addition():
    class Parallel(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + (self.mix(self.norms[0](x)) + self.mlp(self.norms[1](x)))

    model = disturb(jpmhc.wrap(Stack([Parallel(12)]), inputs=inputs()))
    ((connection,),) = connections_of(model)
    x, block = jpmhc.expand_streams(model.embed(inputs()), 4), model.blocks[0]
    x = around(connection, x, lambda h: block.mix(block.norms[0](h)) + block.mlp(block.norms[1](h)))
    assert difference(model.head(jpmhc.reduce_streams(x)), model(inputs())) < EXACT


def test_what_is_added_off_the_residual_stream_is_no_connection():
    class WithPositions(Block):
        def forward(self, x: Tensor) -> Tensor:
            positions = torch.ones(1, *x.shape[1:]).cumsum(1)
            x = x + self.mix(x + positions)
            return x + self.mlp(self.norms[1](x))

    model = disturb(jpmhc.wrap(Stack([WithPositions(12)]), inputs=inputs()))
    ((first, second),) = connections_of(model)
    x, block = jpmhc.expand_streams(model.embed(inputs()), 4), model.blocks[0]
    x = around(first, x, lambda h: block.mix(h + torch.ones(1, 6, 12).cumsum(1)))
    x = around(second, x, lambda h: block.mlp(block.norms[1](h)))
    assert difference(model.head(jpmhc.reduce_streams(x)), model(inputs())) < EXACT


class Residual(nn.Module):
    """An addition that is a module of its own, as in x-transformers: its first argument is the sublayer's output."""

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return y + x


class Decoder(nn.Module):
    """Layers as lists of a norm, a sublayer and an addition."""

    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        parts = [[nn.LayerNorm(dim), Block(dim).mlp, Residual()] for _ in range(depth)]
        self.layers = nn.ModuleList(nn.ModuleList(part) for part in parts)

    def forward(self, x: Tensor) -> Tensor:
        for norm, sublayer, residual in self.layers:
            x = residual(sublayer(norm(x)), x)
        return x


def test_additions_that_are_modules_of_their_own_belong_to_the_module_that_calls_them():
    model = Stack([nn.Identity()])
    model.blocks = Decoder(12, 3)
    model.forward = lambda x: model.head(model.blocks(model.embed(x)))
    before = model(inputs())
    jpmhc.wrap(model, inputs=inputs())
    assert difference(before, model(inputs())) < EXACT
    assert [len(found) for found in connections_of(model)] == [3]
    disturb(model)(inputs()).square().sum().backward()
    first, second, third = connections_of(model)[0]
    for connection in (second, third):  # the streams that the first one reads are equal
        assert float(connection.map.bias.grad[:4].abs().max()) > 1e-3
    x = jpmhc.expand_streams(model.embed(inputs()), 4)
    for (norm, sublayer, _), connection in zip(model.blocks.layers, (first, second, third)):
        x = around(connection, x, nn.Sequential(norm, sublayer))
    assert difference(model.head(jpmhc.reduce_streams(x)), model(inputs())) < EXACT


def test_additions_in_place():
    class InPlace(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            residual = x
            x += self.mix(self.norms[0](x))
            residual.add_(self.mlp(self.norms[1](residual)))
            return residual

    model = Stack(InPlace(12) for _ in range(2))
    wrapped = wrapped_copy(model, inputs=inputs())
    assert [len(found) for found in connections_of(wrapped)] == [2, 2]
    assert difference(model(inputs()), wrapped(inputs())) < EXACT


def test_a_hidden_state_that_others_use_is_reduced_for_them():
    class Gathering(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x, seen = self.embed(x), []
            for number, block in enumerate(self.blocks):
                x = block(x)
                if number == 1:
                    seen.append(x.tanh())
            return self.head(x + seen[0])

    model = Gathering(Block(12) for _ in range(4))
    wrapped = wrapped_copy(model, inputs=inputs())
    plans = [held.plan for held in wrapped_layers(wrapped).values()]
    assert [(plan.first, plan.last) for plan in plans] == [(True, False), (False, True), (True, False), (False, True)]
    assert difference(model(inputs()), wrapped(inputs())) < EXACT


def test_a_layer_that_is_called_again_and_again_stands_alone():
    class Repeating(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for _ in range(3):
                x = self.blocks[0](x)
            return self.head(x)

    model = Repeating([Block(12)])
    wrapped = wrapped_copy(model, inputs=inputs())
    (held,) = wrapped_layers(wrapped).values()
    assert (held.plan.first, held.plan.last) == (True, True)
    assert difference(model(inputs()), wrapped(inputs())) < EXACT


def test_a_sum_that_is_larger_or_more_precise_than_the_hidden_state():
    class Growing(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = x.mean(1, keepdim=True) if x.shape[1] > 1 else x
            x = x + self.mix(x.squeeze(1)).unsqueeze(0).transpose(0, 1).expand(-1, 3, -1)
            return x + self.mlp(x).double()

    class Growth(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[0](self.embed(x[:, :1]))

    torch.set_default_dtype(torch.float32)
    model, x = Growth([Growing(12)]), inputs().float()
    wrapped = wrapped_copy(model, inputs=x)
    assert wrapped(x).dtype == torch.float64
    assert wrapped(x).shape == (2, 3, 12)
    assert difference(model(x), wrapped(x)) < 1e-6


def test_half_precision_keeps_coefficients_in_single():
    torch.set_default_dtype(torch.float32)
    model = Stack(Block(12) for _ in range(2)).to(torch.bfloat16)
    x = inputs().bfloat16()
    wrapped = wrapped_copy(model, inputs=x)
    assert difference(model(x).float(), wrapped(x).float()) < 0.02
    assert {p.dtype for p in wrapped.parameters() if p.numel()} == {torch.bfloat16, torch.float32}
    assert {p.dtype for held in wrapped_layers(wrapped).values() for p in held.parameters()} == {torch.float32}


def test_streams_part_in_training():
    torch.set_default_dtype(torch.float32)
    model = jpmhc.wrap(Stack(Block(12) for _ in range(2)), inputs=inputs().float())
    seen = []
    model.blocks[0].register_forward_hook(lambda layer, args, output: seen.append(output.detach()))
    groups = jpmhc.parameter_groups(model, weight_decay=0.1)
    biases = {
        id(p) for held in wrapped_layers(model).values() for n, p in held.named_parameters() if n.endswith("bias")
    }
    assert biases <= {id(parameter) for parameter in groups[1]["params"]}
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for _ in range(5):
        loss = (model(inputs().float()) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    first, last = seen[0], seen[-1]
    assert first.shape == (2, 6, 4, 12)
    assert float((first - first.mean(-2, keepdim=True)).abs().max()) < 1e-6
    assert float((last - last.mean(-2, keepdim=True)).abs().max()) > 1e-3


def test_deep_copies_and_pickles_are_wrapped_models_of_their_own(tmp_path):
    model = disturb(jpmhc.wrap(Stack(Block(12) for _ in range(2)), inputs=inputs()))
    before = model(inputs())
    torch.save(model, tmp_path / "model.pt")
    copied = copy.deepcopy(model)
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    disturb(model)
    assert difference(before, model(inputs())) > 1e-3
    for other in (copied, loaded):
        assert torch.equal(before, other(inputs()))


def test_weights_load_into_a_model_that_was_wrapped_alike():
    model = disturb(jpmhc.wrap(Stack(Block(12) for _ in range(2)), inputs=inputs()))
    other = jpmhc.wrap(Stack(Block(12) for _ in range(2)), inputs=inputs())
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(inputs()), other(inputs()))


def test_unwrap_gives_the_plain_model_back():
    model = Stack(Block(12) for _ in range(2))
    names, before = [name for name, _ in model.named_modules()], model(inputs())
    assert jpmhc.unwrap(jpmhc.wrap(model, inputs=inputs())) is model
    assert [name for name, _ in model.named_modules()] == names
    assert torch.equal(before, model(inputs()))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("mixer", jpmhc.MIXERS)
def test_every_mixer(mixer, dynamic):
    model = Stack(Block(12) for _ in range(2))
    before = model(inputs())
    jpmhc.wrap(model, mixer=mixer, inputs=inputs(), dynamic=dynamic)
    assert difference(before, model(inputs())) < 1e-6
    assert torch.equal(before, jpmhc.unwrap(model)(inputs()))


def test_unwrap_refuses_trained_connections_unless_forced():
    model = jpmhc.wrap(Stack(PostNormBlock(12, RootMeanSquare) for _ in range(2)), inputs=inputs())
    before = model(inputs())
    wrapped_layers(model)["blocks.1"].additions[1].map.bias.data[0] += 1
    with pytest.raises(ValueError, match=r"blocks\.1\.hyper_connections\.additions\.1 has been trained"):
        jpmhc.unwrap(model)
    assert not wrapped_layers(jpmhc.unwrap(model, force=True))
    assert difference(before, model(inputs())) < EXACT


class Looking(Stack):
    """A model whose hidden states are also computed by a method of its own, as those of timm and open_clip."""

    def forward(self, x: Tensor, looked: bool = False) -> Tensor | dict[str, object]:
        x, states = self.embed(x), {}
        for number, block in enumerate(self.blocks):
            x = block(x)
            if looked:
                states[number] = x.transpose(0, 1)
        return {"logits": self.head(x), "states": {"inside": [states]}} if looked else self.head(x)

    def forward_intermediates(self, x: Tensor, most: int) -> list[Tensor]:
        x, states = self.embed(x), []
        for block in self.blocks[:most]:
            x = block(x)
            states.append(x)
        return states


def test_hidden_states_that_a_method_of_the_model_returns_are_no_streams():
    plain = Looking(Block(12) for _ in range(4))
    model = wrapped_copy(plain, inputs=inputs())
    for most in (4, 2):
        for one, other in zip(plain.forward_intermediates(inputs(), most), model.forward_intermediates(inputs(), most)):
            assert difference(one, other) < EXACT
    disturb(model)
    states = model.forward_intermediates(inputs(), 4)
    assert difference(model(inputs()), model.head(states[-1])) < EXACT
    assert torch.equal(copy.deepcopy(model)(inputs()), model(inputs()))
    gradients = []
    for output in (model(inputs()), model.head(states[-1])):
        gradients.append(torch.autograd.grad(output.square().sum(), list(model.blocks.parameters())))
    assert all(difference(one, other) < EXACT for one, other in zip(*gradients) if one.numel() and one.abs().max() > 0)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_hidden_states_anywhere_in_an_output_are_reduced(mode):
    """As of ESM: transposed, and in a dict inside a dict."""
    plain = Looking(Block(12) for _ in range(3))
    model = wrapped_copy(plain, inputs=inputs())
    with mode():
        wanted, result = (one(inputs(), looked=True)["states"]["inside"][0] for one in (plain, model))
    assert all(difference(wanted[number], result[number]) < EXACT for number in range(3))


class Rearranging(Block):
    """A block that reorders its hidden state with einops, on the way to its sublayers and on the residual stream."""

    def forward(self, x: Tensor) -> Tensor:
        einops = pytest.importorskip("einops")
        rows = len(x)
        x = x + self.mix(self.norms[0](x)).roll(1, -2) + einops.reduce(x, "b t d -> b 1 d", "mean")
        x = einops.rearrange(x, "b t d -> (t b) d")
        x = x + self.mlp(self.norms[1](x))
        return einops.rearrange(x, "(t b) d -> b t d", b=rows)


def test_streams_are_rearranged_by_einops():
    plain = Stack([Rearranging(12), Rearranging(12)])
    before = plain(inputs())
    model = wrapped_copy(plain, inputs=inputs())
    assert difference(before, model(inputs())) < EXACT
    assert [len(layer) for layer in connections_of(model)] == [3, 3]
    assert all(plan.plan.steps[2].name == "permute" for plan in wrapped_layers(model).values())


class Scaling(Stack):
    """A model that scales its hidden state and adds the first one between blocks, as nanochat's GPT."""

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.embed(x)
        for block in self.blocks:
            x = block(0.9 * x + 0.1 * first)
        return self.head(x)


def test_streams_that_end_after_every_layer_are_said():
    said = (
        "6 residual additions in 3 layers of Scaling .*; the streams end after every layer, because the model computes"
    )
    with pytest.warns(UserWarning, match=said):
        jpmhc.wrap(Scaling(Block(12) for _ in range(3)), inputs=inputs())


class Chunking(Block):
    """A block whose second addition is made for one half of the tokens after the other."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.attend(x)
        return torch.cat([half + self.mlp(self.norms[1](half)) for half in x.chunk(2, 1)], 1)

    class Attention(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.mix = nn.Linear(dim, dim)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mix(x).tanh()

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.attend = nn.Sequential(self.Attention(dim))


def test_additions_that_stay_plain_are_named(caplog):
    said = r"2 residual additions in 2 layers of Stack became .*; 4 stay plain, in blocks\.0 \(Chunking\), blocks\.1"
    with pytest.warns(UserWarning, match=said):
        jpmhc.wrap(Stack([Chunking(12), Chunking(12)]), inputs=inputs())
    with caplog.at_level("INFO", logger="jpmhc"):
        model = Stack(Block(12) for _ in range(2))
        jpmhc.wrap(model, inputs=inputs())
    assert caplog.messages == ["4 residual additions in 2 layers of Stack became hyper-connections"]


def test_a_full_backward_hook_of_a_layer_is_told_what_it_misses():
    model = jpmhc.wrap(Stack(Block(12) for _ in range(2)), inputs=inputs())
    model.blocks[1].register_full_backward_hook(lambda layer, inside, outside: None)
    with pytest.warns(UserWarning, match=r"full backward hooks of blocks\.1 get None as grad_input"):
        model(inputs())


class Casting(Block):
    """A block that adds in single precision if its hidden state is in half precision, as Mamba's, and bounds it."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(self.norms[0](x.float().to(self.mix.weight.dtype)))
        x = (x.float() if x.dtype == torch.bfloat16 else x) + y
        if x.dtype == torch.float16:
            x = torch.clamp(x, -60000, 60000)
        return x + self.mlp(self.norms[1](x.to(self.mix.weight.dtype)))


@pytest.mark.parametrize("before", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("after", [torch.float32, torch.float16, torch.bfloat16])
def test_a_type_is_changed_after_wrapping(before, after):
    """Operations that a layer does for some types alone are followed whether or not the probing run met them."""
    torch.set_default_dtype(torch.float32)
    plain = Stack([Casting(12), Block(12)])
    plain.blocks[0].register_forward_hook(lambda layer, args, y: y.to(layer.mix.weight.dtype))
    wrapped = wrapped_copy(plain.to(before), inputs=inputs().to(before)).to(after)
    plain = plain.to(after)
    x = inputs().to(after)
    assert difference(plain(x).float(), wrapped(x).float()) < 30 * torch.finfo(after).eps
    disturb(wrapped)
    compiled = torch.compile(wrapped, backend="aot_eager", fullgraph=True)
    assert difference(wrapped(x).float(), compiled(x).float()) < 30 * torch.finfo(after).eps


def test_a_padding_mask_for_pytorch_s_encoder():
    """In evaluation PyTorch would give its layers a nested tensor, which cannot become streams."""
    plain = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 12, batch_first=True), num_layers=2).eval()
    wrapped = wrapped_copy(plain, inputs=torch.randn(2, 6, 12))
    x, padding = torch.randn(2, 6, 12), torch.zeros(2, 6, dtype=torch.bool)
    padding[0, 4:] = True
    with torch.no_grad():
        wanted, result = (model(x, src_key_padding_mask=padding) for model in (plain, wrapped))
        assert difference(wanted[~padding], result[~padding]) < EXACT
        assert torch.equal(jpmhc.unwrap(wrapped)(x, src_key_padding_mask=padding), wanted)


class Masked(nn.Module):
    """A layer that compares its hidden state with numbers, and divides by it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        chosen = ((x > 0) | (x == 1)) & (x != 2) & (x <= 3)
        return x + self.inner(chosen * (1 / (2 + abs(x))) + (1 - x) ** 2 - (-x))


def test_a_hidden_state_is_compared_and_computed_with_like_a_tensor():
    stack, x = Stack(Masked() for _ in range(2)), inputs()
    before = stack(x)
    assert difference(before, jpmhc.wrap(stack, inputs=x)(x)) < EXACT
