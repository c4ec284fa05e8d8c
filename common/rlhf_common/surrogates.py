"""Half surrogate pairs: a string of Python and JSON may have one, but no UTF-8 text does.

JSON writes one as the escape \\ud83d without its second half. No file, message or tokenizer takes it.
Rule: standard library only, as processes of user code import it. A half is found and shown, never replaced.
"""

from collections.abc import Iterable, Mapping
from typing import Any


def has_half_pair(text: str) -> bool:
    """Return whether a text cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def half_pair(value: Any) -> str | None:
    """Return the path of the first key or string in a JSON value that has a half; None when there is none.

    A key that has one is shown with its escape.
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
    """Return a text with every half written as its escape, for a message."""
    return text.encode("utf-8", "backslashreplace").decode()
