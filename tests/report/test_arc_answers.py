"""The picture of answers: a line for each test, right and wrong told apart, wrong cells marked."""

from pathlib import Path

import numpy as np
from matplotlib import image

from jpmhc.experiments.evaluation.votes import AnsweredTest, Candidate
from jpmhc.report.arc_answers import draw_answers


def answered(right: bool, count: int = 1) -> list[AnsweredTest]:
    truth = np.array([[3, 4], [5, 6]], np.uint8)
    guess = truth if right else np.array([[3, 4], [5, 7]], np.uint8)
    return [AnsweredTest("t", 0, truth, truth, [Candidate(guess, 9, 10)]) for _ in range(count)]


def share(path: Path, colour: str) -> float:
    """Share of the picture that has exactly this colour."""
    pixels = image.imread(path)[..., :3]
    wanted = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)]) / 255
    return float((np.abs(pixels - wanted).max(-1) < 2 / 255).mean())


def test_grids_have_the_colours_of_arc(tmp_path: Path) -> None:
    [path] = draw_answers(answered(True), tmp_path / "sub" / "a.png")
    for colour in ("#2ECC40", "#FFDC00", "#AAAAAA", "#F012BE"):  # 3, 4, 5, 6: each a quarter of three grids
        assert share(path, colour) > 0.03
    assert share(path, "#FF851B") == 0  # 7 is nowhere
    assert share(path, "#1a7f37") > 0.001  # the frame of a right answer
    assert share(path, "#b42318") == 0


def test_wrong_answers_are_framed_and_marked(tmp_path: Path) -> None:
    [path] = draw_answers(answered(False), tmp_path / "a.png")
    assert share(path, "#b42318") > 0.001
    assert share(path, "#1a7f37") == 0
    [right] = draw_answers(answered(True), tmp_path / "b.png")
    assert share(path, "#000000") > share(right, "#000000")  # the outline of the cross


def test_many_answers_go_to_several_pictures(tmp_path: Path) -> None:
    paths = draw_answers(answered(True, 13), tmp_path / "a.png")
    assert [p.name for p in paths] == ["a.png", "a-2.png"]
    assert image.imread(paths[0]).shape[0] == 12 * image.imread(paths[1]).shape[0]
