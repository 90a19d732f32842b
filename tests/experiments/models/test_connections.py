"""The forms of the recursive model's connections: the paper's counts, and what is computed with these parameters."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from jpmhc.experiments.models.connections import make_connection, read_basis
from jpmhc.experiments.models.recursive import RecursiveConfig, RecursiveModel
from jpmhc.experiments.training.presets import PRESETS
from jpmhc.manifolds import orthogonal
from tests.experiments.training.small_run import small, trained

# Table param-counts.
COUNTS = {"sinkhorn": 49_188, "cayley": 102_400, "grassmann": 32_796, "permutation": 28_694}


def make(mixer, **options):
    config = RecursiveConfig(dim=8, heads=2, mixer=mixer, streams=4, **{"mixer_form": "counted", **options})
    return make_connection(config, torch.nn.Identity(), 1)


@pytest.mark.parametrize("mixer", COUNTS)
def test_the_preset_paper_has_the_counts_of_the_table(mixer):
    config = dataclasses.replace(PRESETS["paper"].model, mixer=mixer, mixer_form="counted")
    with torch.device("meta"):
        core = RecursiveModel(config, 12, 900, 1).core
    modules = [block.map for block in core.network.connections]
    assert [sum(p.numel() for p in module.parameters()) for module in modules] == [COUNTS[mixer]] * 4
    plain = 6_829_058
    assert sum(p.numel() for p in core.parameters()) == plain + 4 * COUNTS[mixer]


def test_cayley_is_computed_from_three_full_matrices_behind_a_weighted_norm():
    torch.manual_seed(0)
    connection = make("cayley").double()
    for parameter in connection.map.parameters():
        parameter.data.normal_()
    x = torch.randn(5, 4, 8, dtype=torch.float64)
    module = connection.map
    normed = F.layer_norm(x.flatten(1), (32,), module.norm_weight, module.norm_bias, eps=module.eps)
    read, write, skip = (normed @ module.weight.T * module.scale).view(5, 3, 4, 4).unbind(1)
    found = connection.coefficients(x)
    torch.testing.assert_close(found.read, read.softmax(-1).mean(-2))
    torch.testing.assert_close(found.write, write.softmax(-2).sum(-1))
    torch.testing.assert_close(found.skip, orthogonal.project(skip, 0.1, 2))


def test_scales_multiply_the_logits_of_their_stream():
    torch.manual_seed(0)
    connection = make("sinkhorn").double()
    for parameter in connection.map.parameters():
        parameter.data.normal_()
    x = torch.randn(5, 4, 8, dtype=torch.float64)
    module = connection.map
    dynamic = F.rms_norm(x.flatten(1), (32,), eps=module.eps) @ module.weight.T * module.scale
    read, write, skip = dynamic.split([4, 4, 16], -1)
    skip = (skip.view(5, 4, 4) * module.scales["skip"][:, None]).flatten(1)
    logits = torch.cat([read * module.scales["read"], write * module.scales["write"], skip], -1) + module.bias
    found = connection.coefficients(x)
    torch.testing.assert_close(found.read, logits[:, :4].sigmoid())
    torch.testing.assert_close(found.write, 2 * logits[:, 4:8].sigmoid())
    torch.testing.assert_close(found.skip, module.mixer(logits[:, 8:]))


@pytest.mark.parametrize("mixer", COUNTS)
def test_counted_connections_start_near_the_plain_residual(mixer):
    torch.manual_seed(0)
    x = torch.randn(6, 1, 8).expand(6, 4, 8)
    y = make(mixer)(x)
    torch.testing.assert_close(y, 2 * x, atol=0.3 if mixer == "cayley" else 1e-5, rtol=0)


def test_grassmann_has_half_the_streams_as_rank():
    for streams in (2, 4, 6):
        config = RecursiveConfig(dim=8, heads=2, mixer="grassmann", streams=streams, mixer_form="paper")
        assert make_connection(config, torch.nn.Identity(), 0).mixer.rank == streams // 2


def test_static_frames_train_beside_gates_that_depend_on_the_token(tmp_path):
    model = {"mixer": "grassmann", "streams": 4, "mixer_frames": "static"}
    trainer = trained(small(tmp_path, model=model, frame_lr=0.5))
    learner = trainer.learner
    assert learner.frame_optimiser is not None
    block = learner.core.network.connections[0]
    assert block.map.weight.abs().max() > 0  # the gates' projection, which starts at zero
    start = block.mixer._start_frame()
    moved = block.mixer.frame.detach().double()
    assert (moved @ moved.T - start @ start.T).abs().max() > 1e-6
    torch.testing.assert_close(moved.T @ moved, torch.eye(2, dtype=torch.float64), atol=1e-5, rtol=0)


def test_weight_decay_can_touch_everything(tmp_path):
    for everything in (False, True):
        config = small(tmp_path / str(everything), model={"mixer": "cayley", "streams": 2}, decay_everything=everything)
        optimiser = trained(config).learner.distributed.optimiser
        assert [group["weight_decay"] for group in optimiser.param_groups] == [0.1, 0.1 if everything else 0.0]


@pytest.mark.parametrize(
    ("mixer", "options", "attributes"),
    [
        ("sinkhorn", {"iterations": 5, "tolerance": 1e-3, "gradient": "unrolled"}, {}),
        ("sinkhorn", {"tolerance": 1e-3}, {"iterations": 20, "gradient": "direct"}),
        ("sinkhorn", {"gradient": "gauss_seidel", "gradient_iterations": 3}, {}),
        ("cayley", {"scale": 0.3, "iterations": 4}, {}),
        ("rotation", {"scale": 0.3}, {}),
        ("grassmann", {"rank": 3}, {}),
        ("permutation", {"basis": ((0, 1, 2, 3), (1, 2, 3, 0))}, {"perms": ((0, 1, 2, 3), (1, 2, 3, 0))}),
        ("permutation", {"size": 5}, {"logits": 5}),
    ],
)
def test_settings_reach_every_mixer(mixer, options, attributes):
    settings = {f"mixer_{name}": value for name, value in options.items()}
    config = RecursiveConfig(dim=8, heads=2, mixer=mixer, streams=4, **settings)
    assert config.mixer_settings() == options
    wanted = attributes | {name: value for name, value in options.items() if name not in ("basis", "size")}
    with torch.device("meta"):
        core = RecursiveModel(config, 12, 16, 1).core
    for connection in core.network.connections:
        assert {name: getattr(connection.mixer, name) for name in wanted} == wanted


def test_a_setting_replaces_the_one_of_the_form():
    config = RecursiveConfig(dim=8, heads=2, mixer="cayley", streams=4, mixer_form="paper", mixer_iterations=3)
    assert make_connection(config, torch.nn.Identity(), 0).mixer.iterations == 3
    assert make_connection(config, torch.nn.Identity(), 0).mixer.scale == 0.1
    static = RecursiveConfig(dim=8, heads=2, mixer="grassmann", streams=4, mixer_rank=1, mixer_dynamic=False)
    assert make_connection(static, torch.nn.Identity(), 0).mixer.frame.shape == (4, 1)


@pytest.mark.parametrize("content", ['{"perms": [[0, 1], [1, 0]], "gap": 1}', "[[0, 1], [1, 0]]"])
def test_a_basis_is_read_from_a_file(tmp_path, content):
    (tmp_path / "basis.json").write_text(content)
    assert read_basis(tmp_path / "basis.json") == ((0, 1), (1, 0))


@pytest.mark.parametrize("content", ["{}", "[]", "[[0, 1], [1]]", '[["a"]]', "no", '{"perms": 3}'])
def test_a_file_without_permutations_is_refused_by_name(tmp_path, content):
    (tmp_path / "basis.json").write_text(content)
    with pytest.raises(ValueError, match=r"basis.json (has no list of permutations|is not a JSON file)"):
        read_basis(tmp_path / "basis.json")
    with pytest.raises(ValueError, match="nowhere cannot be read"):
        read_basis(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mixer": "cayley", "mixer_frames": "static"}, "is for mixers with Grassmann frames, not for cayley"),
        ({"mixer": "cayley", "mixer_rank": 2}, "cayley has no mixer_rank: it has mixer_iterations, mixer_scale"),
        ({"mixer": "sinkhorn", "mixer_gradient_iterations": 3}, 'is for gradient="gauss_seidel"'),
        ({"mixer": "kronecker", "mixer_scale": 2.0}, "it has none of these settings"),
        ({"mixer": "permutation", "mixer_size": 2, "mixer_basis": ((0, 1, 2, 3),)}, "leave one of the two away"),
        ({"mixer": "permutation", "mixer_basis": ((0, 1, 2, 2),)}, "expected permutations"),
        ({"mixer": "identity", "streams": 1, "mixer_scale": 2.0}, "has no effect on the plain model"),
        ({"mixer": "grassmann", "mixer_frames": "dynamic", "mixer_dynamic": False}, "needs mixer_dynamic"),
        ({"mixer": "cayley", "mixer_form": "counted", "mixer_dynamic": False}, "leave mixer_dynamic on"),
    ],
)
def test_options_that_do_not_go_together(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        RecursiveConfig(dim=8, heads=2, **{"streams": 4, **options})
