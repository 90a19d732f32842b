"""The ARC decoder: packed, padded and cached attention agree, and connections start as the plain residual."""

import numpy as np
import pytest
import torch

from jpmhc.experiments.models.arc_decoder import ArcDecoder, ArcDecoderConfig, make_block_mask, make_mask, packed_loss
from jpmhc.experiments.models.generation import LONGEST_ANSWER, Generator, measure_losses, prepare_answering
from jpmhc.experiments.tasks.arc import Arc, ArcConfig
from jpmhc.experiments.tasks.arc.puzzles import Pair, Puzzle
from jpmhc.experiments.tasks.arc.sequences import (
    END,
    IN_OUTPUT,
    IN_SEPARATOR,
    NO_LABEL,
    ROW_END,
    SEPARATOR,
    PackedPairs,
    Sequences,
    pack_sequences,
    write_sequences,
)
from jpmhc.mixers import MIXERS

SMALL = {"dim": 32, "layers": 2, "heads": 2, "inner": 32, "dropout": 0.0}
CONNECTIONS = [{}, {"streams": 4, "mixer": "cayley"}, {"streams": 2, "mixer": "identity"}]


@pytest.fixture(scope="module")
def arc() -> Arc:
    rng = np.random.default_rng(0)

    def pair() -> Pair:
        sizes = rng.integers(1, 5, (2, 2))
        return Pair(*(rng.integers(0, 10, size).astype(np.uint8) for size in sizes))

    puzzles = [Puzzle(f"p{k}", (pair(), pair()), (pair(),)) for k in range(4)]
    return Arc(ArcConfig(augmentations=4), puzzles[:2], puzzles[2:])


def make_decoder(arc: Arc, seed: int = 0, **options: object) -> ArcDecoder:
    torch.manual_seed(seed)
    model = ArcDecoder(ArcDecoderConfig(**{**SMALL, **options}), len(arc.puzzles))
    for parameter in model.parameters():  # fresh embeddings are small, and answers would all be the same
        if parameter.ndim == 2 and parameter.shape[1] == model.config.dim and len(parameter) < 32:
            parameter.data *= 30
    return model


@pytest.mark.parametrize("options", CONNECTIONS)
def test_sequences_of_a_pack_do_not_see_each_other(arc: Arc, options: dict) -> None:
    model = make_decoder(arc, **options)
    variant, pair = PackedPairs(arc, 512, seed=0)._plan(0)[0]
    sequences = write_sequences(arc, variant, pair)
    pack = pack_sequences(sequences, 512, len(pair) + 1)
    loss = packed_loss(model, pack, model.vectors(pack.puzzles, pack.symmetries), make_mask(pack))
    alone = measure_losses(model, sequences)
    parts = np.split(sequences.labels, sequences.starts[1:-1])
    counts = np.array([(part != NO_LABEL).sum() for part in parts])
    assert loss.item() == pytest.approx((alone * counts).sum() / counts.sum(), rel=1e-5)
    one = write_sequences(arc, variant[:1], pair[:1])
    assert measure_losses(model, one)[0] == pytest.approx(alone[0], rel=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_computes_the_same(arc: Arc) -> None:
    model = make_decoder(arc)
    pack = PackedPairs(arc, 512, seed=0).pack(0, 0)
    vectors = model.vectors(pack.puzzles, pack.symmetries)
    with torch.no_grad():
        losses = [packed_loss(model, pack, vectors, mask).item() for mask in (make_mask(pack), make_block_mask(pack))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_every_connection_starts_as_the_plain_residual(arc: Arc) -> None:
    pack = PackedPairs(arc, 512, seed=0).pack(0, 0)
    losses = []
    mixers = [{"streams": 4, "mixer": mixer} for mixer in MIXERS]
    for options in [*CONNECTIONS, *mixers]:
        torch.manual_seed(1)
        model = ArcDecoder(ArcDecoderConfig(**SMALL, **options), len(arc.puzzles))
        losses.append(packed_loss(model, pack, model.vectors(pack.puzzles, pack.symmetries), make_mask(pack)).item())
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-4)


def write_slowly(model: ArcDecoder, sequences: Sequences, k: int) -> list[int]:
    """An answer from the whole sequence again for every token."""
    here = slice(sequences.starts[k], sequences.starts[k + 1])
    tokens = [*sequences.tokens[here].tolist(), SEPARATOR]
    places = [*sequences.coordinates[here].tolist(), [IN_SEPARATOR, 0, 0]]
    written: list[int] = []
    row = column = 0

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)

    vectors = model.vectors(*(torch.tensor(t[k]) for t in (sequences.puzzles, sequences.symmetries)))
    while True:
        hidden = model.hidden(model.embed(torch.tensor(tokens), vectors), torch.tensor(places), attend)
        logits = model.logits(hidden[-1])
        following = max([*range(10), ROW_END, END], key=lambda token: float(logits[token]))
        written.append(following)
        outside = (row >= 30 and following != END) or column > 30
        if following == END or outside or len(written) == LONGEST_ANSWER:
            return written
        tokens.append(following)
        places.append([IN_OUTPUT, row, column])
        row, column = (row + 1, 0) if following == ROW_END else (row, column + 1)


@pytest.mark.parametrize("options", CONNECTIONS)
def test_answers_are_those_of_the_whole_sequence(arc: Arc, options: dict) -> None:
    """With fewer slots than prompts, so that slots are taken again, and answers of different lengths."""
    model = prepare_answering(make_decoder(arc, seed=3, **options))
    rows = arc.test_selection()
    _, variant, pair = arc.locate_rows(rows)
    prompts = write_sequences(arc, variant, pair, outputs=False)
    written = Generator(model, 3, int(prompts.lengths.max()) + LONGEST_ANSWER).answer(prompts)
    assert written is not None
    with torch.no_grad():
        for k in range(0, len(prompts), 3):
            assert written.tokens[k, : written.counts[k]].tolist() == write_slowly(model, prompts, k)
    assert len(np.unique(written.counts)) > 1
    assert ((written.confidence > 0) & (written.confidence <= 1)).all()


def test_a_prompt_that_is_too_long_is_refused(arc: Arc) -> None:
    prompts = write_sequences(arc, np.array([0]), np.array([0]), outputs=False)
    with pytest.raises(ValueError, match=r"a prompt has \d+ tokens and its answer up to 931"):
        Generator(prepare_answering(make_decoder(arc)), 1, 900).answer(prompts)


def test_matrices_for_muon_are_those_of_the_layers(arc: Arc) -> None:
    model = make_decoder(arc, streams=4, mixer="cayley")
    assert len(model.hidden_matrices()) == 4 * model.config.layers
    assert not {id(m) for m in model.hidden_matrices()} & {id(model.head.weight), id(model.tokens)}


def test_answers_can_be_given_up(arc: Arc) -> None:
    rows = arc.test_selection()
    prompts = write_sequences(arc, *arc.locate_rows(rows)[1:], outputs=False)
    generator = Generator(prepare_answering(make_decoder(arc)), 2, int(prompts.lengths.max()) + LONGEST_ANSWER)
    looks = iter(range(100))
    assert generator.answer(prompts, stop=lambda: next(looks) == 3) is None
    assert next(looks) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("options", CONNECTIONS)
def test_a_gpu_writes_the_answers_of_a_cpu(arc: Arc, options: dict) -> None:
    """With the recorded graph and the kernel; in float32, so that nearly equal logits do not change places."""
    model = make_decoder(arc, seed=3, dim=64, **options)
    rows = arc.test_selection()
    prompts = write_sequences(arc, *arc.locate_rows(rows)[1:], outputs=False)
    answers = []
    for device in ("cpu", "cuda"):
        generator = Generator(prepare_answering(model.to(device)), 3, int(prompts.lengths.max()) + LONGEST_ANSWER)
        answers.append(generator.answer(prompts))
    assert answers[0] is not None
    assert answers[1] is not None
    same = (answers[0].counts == answers[1].counts) & (answers[0].tokens == answers[1].tokens).all(1)
    assert same.mean() > 0.9
