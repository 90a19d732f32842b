"""Which extra arguments each sublayer of a stack takes: attention has a mask, the MLP beside it has none."""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn


class Accepted(NamedTuple):
    """What a sublayer takes beside its input.

    Attributes:
        positional: How many extra arguments without a name; None: any number.
        keywords: The names of its other arguments; None: any name.
    """

    positional: int | None = None
    keywords: frozenset[str] | None = None


def find_accepted(sublayer: Any) -> Accepted:
    """Read from a sublayer's signature what it takes beside its input; everything, where it has no signature."""
    function = sublayer.forward if isinstance(sublayer, nn.Module) else sublayer
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # None, and functions that are not written in Python
        return Accepted()
    kinds = [parameter.kind for parameter in parameters]
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    places = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    return Accepted(
        None if inspect.Parameter.VAR_POSITIONAL in kinds else max(places - 1, 0),
        None if inspect.Parameter.VAR_KEYWORD in kinds else frozenset(named),
    )


def route_keywords(blocks: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[dict[str, Any]]:
    """Return for each connection those keyword arguments that its sublayer takes.

    A keyword that no sublayer takes is refused, and so are arguments without a name where a sublayer takes fewer.
    """
    takes = [block._accepted for block in blocks]
    for k, one in enumerate(takes):
        if args and one.positional is not None and one.positional < len(args):
            raise ValueError(
                f"sublayer {k} ({type(blocks[k].sublayer).__name__}) takes {one.positional} extra arguments without a "
                f"name, got {len(args)}: pass them by name (mask=…), and only the sublayers that take them get them"
            )
    for name in kwargs:
        if takes and not any(one.keywords is None or name in one.keywords for one in takes):
            known = sorted({key for one in takes for key in one.keywords or ()})
            raise ValueError(f"no sublayer of this stack takes {name!r}; their arguments are {', '.join(known)}")
    return [
        {name: value for name, value in kwargs.items() if one.keywords is None or name in one.keywords} for one in takes
    ]
