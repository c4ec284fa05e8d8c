r"""Unpaired surrogates, such as \ud83d without its second half: strings of Python and JSON may contain them, UTF-8 text
cannot.
"""

from collections.abc import Iterable, Mapping
from typing import Any


def has_half_pair(text: str) -> bool:
    """Return whether a text cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def half_pair(value: Any) -> str | None:
    """Return the path of a key or string in a JSON value with an unpaired surrogate; None if there is none.

    Such a key is shown with its escape.
    """
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        path, node = waiting.pop()
        if isinstance(node, str):
            if has_half_pair(node):
                return path
            continue
        children: Iterable[tuple[str, Any]] = ()
        if isinstance(node, Mapping):
            if bad := next((key for key in node if isinstance(key, str) and has_half_pair(key)), None):
                return f"{path}.{escaped(bad)}".removeprefix(".")
            children = [(f"{path}.{key}".removeprefix("."), child) for key, child in node.items()]
        elif isinstance(node, list | tuple):
            children = [(f"{path}[{index}]", child) for index, child in enumerate(node)]
        waiting += reversed(list(children))
    return None


def escaped(text: str) -> str:
    """Return a text with every unpaired surrogate written as its escape, for a message."""
    return text.encode("utf-8", "backslashreplace").decode()
