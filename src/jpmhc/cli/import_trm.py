"""The command `jpmhc import-trm`."""

import shlex
from pathlib import Path
from typing import Annotated

import tyro

from jpmhc.cli.command import make_main, make_option_form, read_option_form
from jpmhc.cli.evaluate import chosen_options, task_options
from jpmhc.experiments.published.importing import ImportConfig, import_model

_FORM = make_option_form(
    ImportConfig(), file=(Annotated[Path | None, tyro.conf.Positional], None), task_options=task_options()
)


def import_trm(config: Annotated[type(_FORM), tyro.conf.arg(name="")]) -> None:  # type: ignore[valid-type]
    """Make a run out of a published Tiny Recursive Model, to be evaluated, asked or trained further.

    Example: jpmhc import-trm step_518071 --identifiers identifiers.json --config all_config.yaml --out out/trm-arc1

    --mixer cayley gives the model hyper-connections without changing its outputs.
    """
    imported = import_model(read_option_form(config, task_options=chosen_options(config.task_options)))
    print(f"wrote {imported.checkpoint}")
    if imported.remark:
        print(imported.remark)
    run = shlex.quote(str(imported.config.out))
    print(f"score it: jpmhc evaluate {run}")
    print(f"train it further: jpmhc train --out {run} --resume latest")


main = make_main(import_trm)
