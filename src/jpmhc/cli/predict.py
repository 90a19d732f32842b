"""The command `jpmhc predict`."""

from pathlib import Path
from typing import Annotated

import tyro

from jpmhc.cli.command import is_first_process, make_main, make_option_form, read_option_form
from jpmhc.cli.evaluate import TASK_OPTIONS, chosen_options
from jpmhc.experiments.evaluation.checkpoints import VOTES, PredictConfig, predict_answers

_FORM = make_option_form(
    PredictConfig(), run=(Annotated[Path | None, tyro.conf.Positional], None), task_options=TASK_OPTIONS
)


def predict(config: Annotated[type(_FORM), tyro.conf.arg(name="")]) -> None:  # type: ignore[valid-type]
    """Answer ARC tests by vote: a submission file for ARC Prize, and pictures of the answers.

    Example: jpmhc predict out/arc-small --tasks 00576224 009d5c81 --out out/submission.json

    Pictures are drawn only for the tasks that --tasks names.
    """
    chosen = read_option_form(config, task_options=chosen_options(config.task_options))
    answered, out = predict_answers(chosen)
    if not is_first_process():
        return
    print(f"wrote {out} with {len(answered)} answer{'' if len(answered) == 1 else 's'}")
    if chosen.out is None:
        print(f"wrote {out.with_suffix(VOTES)} for jpmhc report")
    if chosen.tasks:
        from jpmhc.report.arc_answers import draw_answers

        for picture in draw_answers(answered, out.with_suffix(".png")):
            print(f"wrote {picture}")


main = make_main(predict)
