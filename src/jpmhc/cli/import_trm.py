"""The command `jpmhc import-trm`."""

import shlex
from pathlib import Path
from typing import Annotated

import tyro

from jpmhc.cli.command import make_main
from jpmhc.cli.evaluate import TASK_OPTIONS, chosen_options
from jpmhc.experiments.published import import_model


def import_trm(
    file: Annotated[Path, tyro.conf.Positional],
    identifiers: Path,
    config: Path,
    out: Path,
    task: TASK_OPTIONS[0] = TASK_OPTIONS[1],  # type: ignore[valid-type]
    mixer: str | None = None,
    streams: int | None = None,
) -> None:
    """Make a run out of a published Tiny Recursive Model, to be evaluated, asked or trained further.

    Example: jpmhc import-trm step_518071 --identifiers identifiers.json --config all_config.yaml --out out/trm-arc1

    --mixer cayley gives the model hyper-connections without changing its outputs.

    Args:
        file: The checkpoint, such as step_518071.
        identifiers: The identifiers.json of the model's training data, with the puzzle of each row of the puzzle table.
        config: The all_config.yaml from the checkpoint's folder, with the numbers of cycles.
        out: Folder of the new run.
        task: The options of the model's task.
        mixer: Mixer of hyper-connections to add to the model, whose outputs stay equal; by default none.
        streams: Number of residual streams of the hyper-connections; by default four.
    """
    imported = import_model(file, identifiers, config, out, mixer, streams, chosen_options(task))
    print(f"wrote {imported.checkpoint}")
    if imported.remark:
        print(imported.remark)
    run = shlex.quote(str(out))
    print(f"score it: jpmhc evaluate {run}")
    print(f"train it further: jpmhc train --out {run} --resume latest")


main = make_main(import_trm)
