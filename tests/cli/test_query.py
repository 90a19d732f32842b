"""From the words of a command line to a network, its numbers and a file of its curve."""

import csv
import math

import numpy as np
import pytest
import torch

from jpmhc.cli.spectrum import Query, answer_query, read_skips, write_curve
from jpmhc.spectra import Network
from tests.spectra.problems import identity_moments, shifted_gaussian_edges

ROTATION = np.array([[0.6, -0.8], [0.8, 0.6]])


def test_default_network_is_what_the_words_say():
    network = Query().network()
    assert network.skips.shape == (10, 4, 4)
    assert (network.skips.sum(-1) - 1).abs().max() < 1e-9
    assert (network.skips.sum(-2) - 1).abs().max() < 1e-9
    assert float(network.variance.sum()) == pytest.approx(0.05, rel=1e-12)
    assert network.isotropic
    assert not network.identical


def test_every_option_reaches_the_network():
    network = Query(mixer="cayley", depth=3, streams=5, noise=0.6, shared=True, block=True, seed=4).network()
    eye = torch.eye(5, dtype=torch.float64)
    assert (network.skips @ network.skips.mT - eye).abs().max() < 1e-12
    assert network.identical
    assert torch.allclose(network.variance, torch.full((3,), 0.2, dtype=torch.float64))
    # the block reads the mean of the streams and writes to all of them
    assert network.read.tolist() == [[0.2] * 5] * 3
    assert network.write.tolist() == [[1.0] * 5] * 3
    other = Query(mixer="cayley", depth=3, streams=5, noise=0.6, shared=True, block=True, seed=5).network()
    assert not torch.equal(network.skips, other.skips)


def test_that_a_method_is_not_exact_is_said_once():
    with pytest.warns(UserWarning, match="not the Jacobian's spectrum") as caught:
        answer_query(Query(mixer="bistochastic", depth=2, streams=2, shared=True, method="z1", eta=0.05))
    assert len(caught) == 1


def test_noise_from_an_activation():
    # a linear sublayer of weight scale 0.3 has noise 0.09 in each layer, whatever flows through it
    linear = Query(activation="linear", weight_scale=0.3, depth=4).network()
    assert torch.allclose(linear.variance, torch.full((4,), 0.09, dtype=torch.float64))
    # ReLU halves it
    relu = Query(activation="relu", weight_scale=0.3, depth=4, input_variance=7.0).network()
    assert torch.allclose(relu.variance, torch.full((4,), 0.045, dtype=torch.float64))
    # tanh is flatter where its input is large
    small, large = (
        Query(activation="tanh", depth=1, input_variance=variance).network().variance for variance in (0.01, 9.0)
    )
    assert float(small) > 0.9 > 0.5 > float(large)


def test_answer_against_closed_forms():
    answer = answer_query(Query(mixer="identity", depth=1, streams=3, noise=0.04))
    truth = [math.sqrt(edge) for edge in shifted_gaussian_edges(0.2)]
    assert answer.edges.shape == (1, 2)
    assert np.abs(answer.edges[0].numpy() - truth).max() < 1e-3
    assert np.allclose(answer.moments[:2], identity_moments(1, 0.04), rtol=1e-8)
    assert answer.density.exact
    assert answer.seconds > 0
    assert answer.sampled is None
    assert answer.distances is None


def test_simulation_is_beside_the_theory_and_depends_on_its_options():
    stages = []
    answer = answer_query(
        Query(mixer="orthogonal", depth=3, noise=0.3, simulate=True, samples=7, width=20), stages.append
    )
    assert stages == ["density", "edges and moments", "7 sampled networks"]
    assert answer.sampled.shape == (7, 80)
    # the mean of squared singular values is the network's gain, (1 + 0.1)^3
    assert float(answer.sampled.mean()) == pytest.approx(1.331, rel=0.02)
    assert float(answer.moments[0]) == pytest.approx(1.331, rel=1e-8)
    assert answer.distances.wasserstein < 0.02
    inside = (answer.sampled.sqrt() > answer.edges[0, 0] - 0.03) & (answer.sampled.sqrt() < answer.edges[0, 1] + 0.03)
    assert inside.double().mean() > 0.97


def test_eta_method_and_refinement_are_passed_on():
    fixed = answer_query(Query(mixer="orthogonal", depth=2, eta=0.05, method="z1"))
    assert set(fixed.density.eta.tolist()) == {0.05}
    assert fixed.density.method == "z1"
    relative = answer_query(Query(mixer="orthogonal", depth=2, relative_eta=0.01, refine="richardson"))
    assert torch.allclose(relative.density.eta, relative.density.x * 0.01)
    plain = answer_query(Query(mixer="orthogonal", depth=2, relative_eta=0.01))
    # extrapolated to no smoothing, the curve is sharper
    assert relative.density.values.max() > plain.density.values.max()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"weight_scale": 2.0}, "--weight-scale describes a nonlinear network and needs --activation"),
        ({"input_variance": 2.0}, "--input-variance .* needs --activation"),
        ({"activation": "tanh", "noise": 0.1}, "--noise is what --activation decides"),
        ({"matrix": "a.npy", "mixer": "cayley"}, "--mixer describes random skips, and --matrix gives them"),
        ({"matrix": "a.npy", "streams": 3}, "--streams describes random skips"),
        ({"matrix": "a.npy", "shared": True}, "--shared describes random skips"),
        ({"samples": 5}, "--samples .* needs --simulate"),
        ({"width": 5}, "--width .* needs --simulate"),
        ({"eta": 0.1, "relative_eta": 0.1}, "exclude each other"),
        ({"depth": 2.5}, "depth must be a whole number, at least 1, got 2.5"),
        ({"depth": 0}, "depth must be a whole number, at least 1, got 0"),
        ({"streams": 0}, "streams must be a whole number"),
        ({"simulate": True, "width": 0}, "width must be a whole number"),
    ],
)
def test_options_without_effect_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Query(**options)


def test_bad_values_are_refused_before_any_work():
    with pytest.raises(ValueError, match="noise must be finite and not negative"):
        Query(noise=math.nan).network()
    with pytest.raises(ValueError, match="no random skip is called 'foo'"):
        Query(mixer="foo").network()
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no available device is called 'cuda'; choose one of cpu"):
            Query(device="cuda").network()


@pytest.mark.parametrize("name", ["skip.npy", "skip.pt", "skip.csv", "skip.txt", "comma.txt"])
def test_matrix_files(name, tmp_path):
    path = tmp_path / name
    if name.endswith("npy"):
        np.save(path, ROTATION)
    elif name.endswith("pt"):
        torch.save(torch.from_numpy(ROTATION), path)
    else:
        np.savetxt(path, ROTATION, delimiter=" " if name == "skip.txt" else ", ")
    network = Query(matrix=path, depth=3).network()
    assert network.skips.shape == (3, 2, 2)
    assert np.abs(network.skips.numpy() - ROTATION).max() < 1e-15
    assert Query(matrix=path).network().depth == 10


def test_a_file_of_layers_says_how_many(tmp_path):
    skips = np.stack([np.eye(2), ROTATION, 2 * np.eye(2)])
    np.save(tmp_path / "skips.npy", skips)
    query = Query(matrix=tmp_path / "skips.npy", noise=0.3)
    assert np.array_equal(query.network().skips.numpy(), skips)
    assert torch.allclose(query.network().variance, torch.full((3,), 0.1, dtype=torch.float64))
    with pytest.raises(ValueError, match="depth 4 contradicts the 3 layers of the skips in"):
        read_skips(tmp_path / "skips.npy", 4)


def bad_files():
    yield "missing.npy", None, "there is no file .*missing.npy"
    yield "complex.npy", np.eye(2) * 1j, "complex.npy must be real"
    yield "nan.npy", np.full((2, 2), np.nan), "nan.npy must be finite, without NaN"
    yield "words.npy", np.array(["a", "b"]), "words.npy must be real numbers"
    yield "objects.npy", np.array([1, None], dtype=object), "objects.npy holds no matrix"
    yield "wide.npy", np.ones((2, 3)), r"wide.npy must be square matrices, .* not of shape \[2, 3\]"
    yield "row.npy", np.ones(3), r"not of shape \[3\]"
    yield "torn.npy", b"\x93NUMPY\x01\x00", "torn.npy holds no matrix"
    yield "archive.npz", b"PK\x8c\xff", "archive.npz is not text"
    yield "empty.csv", b"", "empty.csv must be square matrices"
    yield "words.csv", b"hello,world\n", "words.csv holds no matrix: could not convert string 'hello'"
    yield "ragged.txt", b"1 2\n3\n", "ragged.txt holds no matrix: the number of columns changed"
    yield "complex.txt", b"1+2j 0\n0 1\n", "complex.txt holds no matrix"
    yield "dictionary.pt", {"skip": torch.eye(2)}, "dictionary.pt must hold one array of skips, not a dict"
    yield "module.pt", torch.nn.Linear(2, 2), "module.pt holds no matrix"
    yield (
        "sparse.pt",
        torch.eye(2).to_sparse(),
        "sparse.pt must be a dense tensor .* not one that is sparse",
    )
    yield "meta.pt", torch.eye(2, device="meta"), "meta.pt must be a dense tensor"
    yield "long.csv", b"x" * 5000, "long.csv holds no matrix: could not convert string 'xxx"
    yield "junk.pt", b"junkjunk", "junk.pt holds no matrix: it is not a file that torch.save wrote"


@pytest.mark.parametrize(("name", "content", "sentence"), list(bad_files()))
def test_files_that_hold_no_matrix(name, content, sentence, tmp_path):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, np.ndarray):
        np.save(path, content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(ValueError, match=sentence) as refusal:
        Query(matrix=path).network()
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < len(str(path)) + 300


def test_title_says_what_was_asked(tmp_path):
    query = Query(depth=3, noise=0.2, block=True)
    assert query.title(query.network()) == "sinkhorn skips, n = 4, L = 3, Lσ² = 0.2, hyper-connection block"
    np.save(tmp_path / "a.npy", ROTATION)
    query = Query(matrix=tmp_path / "a.npy", activation="relu", weight_scale=0.5)
    assert query.title(query.network()) == f"{tmp_path / 'a.npy'}, n = 2, L = 10, relu, σ_w = 0.5"


def test_curve_file_holds_the_density(tmp_path):
    found = answer_query(Query(mixer="identity", depth=1, streams=1)).density
    path = write_curve(found, tmp_path / "deep" / "curve.csv")
    with path.open() as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    column = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    assert np.array_equal(column["x"], found.x.numpy())
    assert np.array_equal(column["density_x"], found.values.numpy())
    assert np.allclose(column["singular_value"] ** 2, column["x"], rtol=1e-14)
    assert np.trapezoid(column["density_s"], column["singular_value"]) == pytest.approx(1, abs=2e-3)
    assert column["cumulative"][-1] == 1
    assert (np.diff(column["cumulative"]) >= 0).all()
    assert not column["interpolated"].any()


def test_network_of_a_query_is_the_one_of_its_parts():
    direct = Network.from_mixer("gaussian", 2, 0.025, 3, seed=9)
    asked = Query(mixer="gaussian", depth=2, streams=3, seed=9).network()
    assert torch.equal(direct.skips, asked.skips)
    assert torch.equal(direct.variance, asked.variance)
