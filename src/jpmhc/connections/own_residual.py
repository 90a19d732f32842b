"""Notice a sublayer that adds its own input: a connection around it would add the input a second time."""

import ast
import functools
import inspect
import textwrap
import warnings
from typing import Any

from torch import nn


def warn_of_own_residual(sublayer: Any) -> None:
    """Warn if the source of a sublayer's forward adds the input to something computed from it.

    Only plain Python is understood, `x + f(x)` and `residual = x` with `residual + h` later; what is not understood
    passes in silence.
    """
    while isinstance(sublayer, nn.Sequential) and len(sublayer) == 1:
        sublayer = sublayer[0]
    if not isinstance(sublayer, nn.Module):
        return
    found = _find_addition(type(sublayer).forward)
    if found is not None:
        parts = [name for name, _ in sublayer.named_children()] or [name for name, _ in sublayer.named_parameters()]
        warnings.warn(
            f"the sublayer {type(sublayer).__name__} (with {', '.join(parts) or 'no parameters'}) adds its own input, "
            f"`{found}`, and the connection around it adds it again: make one connection for each part without its "
            "residual, or let jpmhc.wrap replace the additions of a whole model",
            stacklevel=3,
        )


@functools.cache
def _find_addition(forward: Any) -> str | None:
    """Return the expression that adds a function's first argument to something computed from it, if there is one."""
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
    """A walk through a function's statements that knows which names are its input, and which are made from it."""

    def __init__(self, argument: str) -> None:
        self.input, self.made = {argument}, {argument}

    def search(self, statements: list[ast.stmt]) -> str | None:
        """Return the first addition of the input among these statements and those inside them."""
        for statement in statements:
            inner = [getattr(statement, part, []) for part in ("body", "orelse")]
            found = self._look_at(statement) if not any(inner) else None
            for body in inner:
                found = found or self.search(body)
            if found:
                return found
        return None

    def _look_at(self, statement: ast.stmt) -> str | None:
        for node in ast.walk(statement):
            sides: tuple[ast.expr, ast.expr] | None = None
            if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
                sides = node.target, node.value
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
                sides = node.left, node.right
            if sides and any(self._is_input(one) and self._is_made(other) for one, other in (sides, sides[::-1])):
                return ast.unparse(node)
        if isinstance(statement, ast.Assign):
            is_input, is_made = self._is_input(statement.value), self._is_made(statement.value)
            for target in statement.targets:
                for node in ast.walk(target):
                    if isinstance(node, ast.Name):
                        (self.input.add if is_input else self.input.discard)(node.id)
                        (self.made.add if is_made or is_input else self.made.discard)(node.id)
        return None

    def _is_input(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id in self.input

    def _is_made(self, node: ast.AST) -> bool:
        """Say whether an expression calls a function on the input, or names what such a call returned."""
        if isinstance(node, ast.Name):
            return node.id in self.made - self.input
        calls = (call for call in ast.walk(node) if isinstance(call, ast.Call))
        names = (name for call in calls for part in (*call.args, *call.keywords) for name in ast.walk(part))
        return any(isinstance(name, ast.Name) and name.id in self.made for name in names)
