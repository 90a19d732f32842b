"""The command `jpmhc predict`."""

from collections.abc import Sequence
from typing import Annotated

import tyro

from jpmhc.cli.output import is_first_process
from jpmhc.report.arc_grids import draw_answers
from jpmhc.trm.training.evaluation import PredictConfig
from jpmhc.trm.training.evaluation import predict as predict_answers


def main(words: Sequence[str]) -> None:
    """Parse the words after `jpmhc predict` and run it."""
    tyro.cli(predict, prog="jpmhc predict", args=words)


def predict(config: Annotated[PredictConfig, tyro.conf.arg(name="")]) -> None:
    """Answer ARC tests by vote: a submission file for ARC Prize, and pictures of the answers.

    Example: jpmhc predict out/arc-small --tasks 00576224 009d5c81 --out out/submission.json

    Pictures are drawn of the tasks that --tasks names.
    """
    answered, out = predict_answers(config)
    if not is_first_process():
        return
    print(f"wrote {out} with {len(answered)} answer{'' if len(answered) == 1 else 's'}")
    if config.tasks:
        for picture in draw_answers(answered, out.with_suffix(".png")):
            print(f"wrote {picture}")
