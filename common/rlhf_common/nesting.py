"""Checks the nesting depth of an external value before anything recurses over it or copies it.

Rule: the check itself does not recurse.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

MAX_DEPTH: Final = 64
"""Maximum levels of mappings and lists in a manifest."""


def too_deep(value: object, limit: int = MAX_DEPTH) -> str | None:
    """Return the path of a field nested more than `limit` levels deep; None if there is none."""
    waiting: list[tuple[str, object, int]] = [("", value, 0)]
    while waiting:
        path, node, depth = waiting.pop()
        for name, child in _members(node):
            if not isinstance(child, Mapping | list):
                continue
            below = f"{path}{name}"
            if depth + 1 >= limit:
                return below.removeprefix(".")
            waiting.append((below, child, depth + 1))
    return None


def _members(node: Any) -> Iterator[tuple[str, object]]:
    if isinstance(node, Mapping):
        yield from ((f".{name}", child) for name, child in node.items())
    elif isinstance(node, list):
        yield from ((f"[{index}]", child) for index, child in enumerate(node))
