"""The command `jpmhc`: parse, call, print."""

import sys

import tyro


def demo() -> None:
    """Train a small deep stack with every mixer on a generated task and compare them."""


COMMANDS = {
    "demo": demo,
}


def main(arguments: list[str] | None = None) -> None:
    """Run one command; bad input ends with one sentence on stderr and exit status 2."""
    try:
        tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="jpmhc", description=__doc__, args=arguments)
    except (ValueError, OSError) as error:
        print(f"jpmhc: {error}", file=sys.stderr)
        sys.exit(2)
