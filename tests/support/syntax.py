"""The syntax of modules, for tests that read all of the code: `ast.walk` takes three times as long."""

import ast
from collections.abc import Iterator

LEAVES = (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)
"""Nodes that say no more than their type, which their parents hold too."""


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all nodes below it, except `LEAVES`, in any order."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                waiting += [item for item in value if isinstance(item, ast.AST) and not isinstance(item, LEAVES)]
            elif isinstance(value, ast.AST) and not isinstance(value, LEAVES):
                waiting.append(value)
