"""The command `jpmhc import-trm`."""

import shlex
from pathlib import Path
from typing import Annotated

import tyro

from jpmhc.cli.command import make_main, options_of
from jpmhc.cli.evaluate import TASK_OPTIONS, chosen_options
from jpmhc.experiments.published import import_model


def import_trm(
    file: Annotated[Path, tyro.conf.Positional],
    options: options_of(import_model, "identifiers", "config", "out", "mixer", "streams"),  # type: ignore[valid-type]
    task: TASK_OPTIONS[0] = TASK_OPTIONS[1],  # type: ignore[valid-type]
) -> None:
    """Make a run out of a published Tiny Recursive Model, to be evaluated, asked or trained further.

    Example: jpmhc import-trm step_518071 --identifiers identifiers.json --config all_config.yaml --out out/trm-arc1

    --mixer cayley gives the model hyper-connections without changing its outputs.

    Args:
        file: The checkpoint, such as step_518071.
    """
    imported = import_model(file, **options, task_options=chosen_options(task))
    print(f"wrote {imported.checkpoint}")
    if imported.remark:
        print(imported.remark)
    run = shlex.quote(str(options["out"]))
    print(f"score it: jpmhc evaluate {run}")
    print(f"train it further: jpmhc train --out {run} --resume latest")


main = make_main(import_trm)
