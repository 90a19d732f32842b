"""Whether a call that was given something hostile ends as documented."""

from collections.abc import Callable
from typing import Any

LONGEST = 1000  # characters of a message


def find_fault(call: Callable[[], Any], mentions: str = "") -> tuple[Any, str | None]:
    """Call a function that may refuse what it was given.

    A refusal is a ValueError or an OSError with one line of reasonable length.

    Args:
        call: The function.
        mentions: What a refusal must name, such as a file.

    Returns:
        What the function returned, or None where it refused; and what is wrong about how it ended, or None.
    """
    try:
        return call(), None
    except (ValueError, OSError) as refusal:
        said = str(refusal)
        if not said or "\n" in said or len(said) > LONGEST:
            return None, f"refused in {len(said)} characters and {said.count(chr(10)) + 1} lines: {said[:200]!r}"
        return None, None if mentions in said else f"the refusal does not name {mentions}: {said[:200]}"
    except Exception as error:  # noqa: BLE001 - any other exception is what the campaign looks for
        return None, f"{type(error).__name__}: {str(error)[:200]!r}"
