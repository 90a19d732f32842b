"""Reading JSON that others wrote: whatever is wrong with it is one kind of error."""

import json
from typing import Any


class NotJson(ValueError):
    """A text is not JSON that can be read; the message says why."""


def parse_json(text: bytes) -> Any:
    """Parse the bytes of a JSON file, which is UTF-8."""
    try:
        return json.loads(text.decode())
    except RecursionError:
        raise NotJson("JSON that is nested too deeply") from None
    except ValueError as error:  # also of bytes that are not UTF-8, and of numbers with thousands of digits
        raise NotJson(f"not a JSON file ({str(error).partition(';')[0]})") from None
