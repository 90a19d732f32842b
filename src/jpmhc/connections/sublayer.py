"""Inspect a connection's sublayer: the arguments it takes, the result, and whether it adds its own input."""

import ast
import functools
import inspect
import textwrap
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from jpmhc import dtensors
from jpmhc.connections.streams import check_streams, describe

if TYPE_CHECKING:
    from jpmhc.connections.contract import State
    from jpmhc.connections.hyper import HyperConnection


class AcceptedArguments(NamedTuple):
    """The arguments that a sublayer takes besides its input.

    Attributes:
        positional: The number of positional arguments; None means any number.
        keywords: The names of keyword arguments; None means any name.
    """

    positional: int | None = None
    keywords: frozenset[str] | None = None


def find_accepted(sublayer: Any) -> AcceptedArguments:
    """Return the arguments that a sublayer accepts besides its input: any arguments if it has no signature."""
    function = sublayer.forward if isinstance(sublayer, nn.Module) else sublayer
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # None, and functions that are not written in Python
        return AcceptedArguments()
    kinds = [parameter.kind for parameter in parameters]
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    positions = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    return AcceptedArguments(
        None if inspect.Parameter.VAR_POSITIONAL in kinds else max(positions - 1, 0),
        None if inspect.Parameter.VAR_KEYWORD in kinds else frozenset(named),
    )


def route_keywords(blocks: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the keyword arguments that each connection's sublayer takes, as one dict per connection.

    Raise an error for a keyword that no sublayer takes, and for more positional arguments than a sublayer takes.
    """
    takes = [block._accepted for block in blocks]
    for k, one in enumerate(takes):
        if args and one.positional is not None and one.positional < len(args):
            raise ValueError(
                f"sublayer {k} ({type(blocks[k].sublayer).__name__}) takes {one.positional} extra arguments without a "
                f"name, got {len(args)}: pass them by name (mask=…), which reaches only the sublayers that take them"
            )
    for name in kwargs:
        if takes and not any(one.keywords is None or name in one.keywords for one in takes):
            known = sorted({key for one in takes for key in one.keywords or ()})
            raise ValueError(f"no sublayer of this stack takes {name!r}; their arguments are {', '.join(known)}")
    return [
        {name: value for name, value in kwargs.items() if one.keywords is None or name in one.keywords} for one in takes
    ]


def first_of(result: Any) -> Any:
    """Return the part of a sublayer's result that is written to the streams: all of it, or a tuple's first item."""
    return result[0] if isinstance(result, tuple) and result else result


def check_sublayer_output(y: Any, x: Tensor) -> Tensor:
    """Return a sublayer's output [..., d]. Raise an error if it cannot be written to the streams x."""
    if dtensors.is_dtensor(x) and not dtensors.is_dtensor(y):  # a sublayer may return only this process's tokens
        x = x.to_local()
    wanted = (*x.shape[:-2], x.shape[-1])
    if not isinstance(y, Tensor) or y.shape != wanted:
        raise ValueError(f"the sublayer must return a tensor of shape {list(wanted)}, got {describe(y)}")
    if not y.is_floating_point():
        raise ValueError(f"the sublayer must return floating-point numbers, got {y.dtype}")
    return y


def check_write(block: "HyperConnection", x: Tensor, y: Tensor, state: "State") -> None:
    """Raise an error unless x, the sublayer's output y and the state match the connection's read."""
    check_streams(x, block.streams, block.dim)
    check_sublayer_output(y, x)
    if not hasattr(state, "fits"):
        raise ValueError(f"the state must be what this connection's read returned, got {type(state).__name__}")
    if not state.fits(block) or x.shape[:-2] != state.x.shape[:-2] or x.dtype != state.x.dtype:
        raise ValueError(
            f"the state must be what this connection's read returned for these streams: it is of {state.x.dtype} "
            f"{list(state.x.shape)}, the streams are {x.dtype} {list(x.shape)}"
        )


def warn_of_own_residual(sublayer: Any) -> None:
    """Warn if the source of a sublayer's forward adds the input to a value computed from the input.

    Two patterns are recognised: `x + f(x)`, and `residual = x` with a later `residual + h`.
    """
    while isinstance(sublayer, nn.Sequential) and len(sublayer) == 1:
        sublayer = sublayer[0]
    if not isinstance(sublayer, nn.Module):
        return
    addition = _find_addition(type(sublayer).forward)
    if addition is not None:
        parts = [name for name, _ in sublayer.named_children()] or [name for name, _ in sublayer.named_parameters()]
        warnings.warn(
            f"the sublayer {type(sublayer).__name__} (with {', '.join(parts) or 'no parameters'}) adds its own input, "
            f"`{addition}`, and the connection around it adds it again: make one connection for each part without its "
            "residual, or let jpmhc.wrap replace the additions of a whole model",
            stacklevel=3,
        )


@functools.cache
def _find_addition(forward: Any) -> str | None:
    """Return the first expression that adds a module's input to a value computed from the input, or None."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):  # no source, as in an interpreter's session
        return None
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef):
        return None
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    return _Additions(names[1]).search(function.body) if len(names) > 1 else None  # the first is the module


class _Additions:
    """A search through a function's statements that tracks the names of the input and of values computed from it."""

    def __init__(self, argument: str) -> None:
        self.input, self.computed = {argument}, {argument}

    def search(self, statements: list[ast.stmt]) -> str | None:
        """Return the first expression in these (nested) statements that adds the input to a value computed from it."""
        for statement in statements:
            inner = [getattr(statement, part, []) for part in ("body", "orelse")]
            addition = self._look_at(statement) if not any(inner) else None
            for body in inner:
                addition = addition or self.search(body)
            if addition:
                return addition
        return None

    def _look_at(self, statement: ast.stmt) -> str | None:
        for node in ast.walk(statement):
            sides: tuple[ast.expr, ast.expr] | None = None
            if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
                sides = node.target, node.value
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
                sides = node.left, node.right
            if sides and any(self._is_input(one) and self._is_computed(other) for one, other in (sides, sides[::-1])):
                return ast.unparse(node)
        if isinstance(statement, ast.Assign):
            is_input, is_computed = self._is_input(statement.value), self._is_computed(statement.value)
            for target in statement.targets:
                for node in ast.walk(target):
                    if isinstance(node, ast.Name):
                        (self.input.add if is_input else self.input.discard)(node.id)
                        (self.computed.add if is_computed or is_input else self.computed.discard)(node.id)
        return None

    def _is_input(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id in self.input

    def _is_computed(self, node: ast.AST) -> bool:
        """Return whether an expression calls a function on the input, or is the name of such a call's result."""
        if isinstance(node, ast.Name):
            return node.id in self.computed - self.input
        calls = (call for call in ast.walk(node) if isinstance(call, ast.Call))
        names = (name for call in calls for part in (*call.args, *call.keywords) for name in ast.walk(part))
        return any(isinstance(name, ast.Name) and name.id in self.computed for name in names)
