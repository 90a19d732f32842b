"""The file `identifiers.json` of a published model's data: entry k names the puzzle of row k in the puzzle table."""

from pathlib import Path

from jpmhc.files import NotJson, parse_json

BLANK = "<blank>"  # the name of rows without a puzzle, such as row 0


def read_identifiers(path: Path) -> list[str]:
    """Read the names of a puzzle table's rows."""
    try:
        names = parse_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    except NotJson as error:
        raise ValueError(f"{path} is {error}") from None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path} is not a list of names, as the identifiers.json of a published model is")
    if names[0] != BLANK:
        raise ValueError(f"the first entry of {path} is {names[0]!r}; row 0 belongs to no task and is named {BLANK}")
    return names
