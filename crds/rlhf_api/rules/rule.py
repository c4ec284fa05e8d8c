"""One rule that crosses fields, and how it reads a manifest. A rule is data: field, CEL, Python check, words."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


class UnknownValueError(LookupError):
    """A field a rule reads is absent or itself wrong, so the rule says nothing."""


class Values:
    """A manifest with its defaults filled in, read by path; fields with problems of their own cannot be read."""

    def __init__(self, data: Mapping[str, Any], broken: Iterable[str] = ()) -> None:
        self._data = data
        self._broken = frozenset(broken)

    def __getitem__(self, path: str) -> Any:
        value = self._find(path)
        if value is None or any(each.startswith((f"{path}.", f"{path}[")) for each in self._broken):
            raise UnknownValueError(path)
        return value

    def has(self, path: str) -> bool:
        """Whether the field is set; UnknownValueError when something around it is wrong."""
        return self._find(path) is not None

    def _find(self, path: str) -> Any:
        node: Any = self._data
        walked = ""
        for name in path.split("."):
            walked = f"{walked}.{name}" if walked else name
            if walked in self._broken:
                raise UnknownValueError(walked)
            node = node.get(name) if isinstance(node, Mapping) else None
        return node


@dataclass(frozen=True)
class Rule:
    """One statement. `cel` is written over `self`, the object at `node`; `field` is the field to blame.

    One that speaks of `oldSelf` as an optional is of new jobs alone, and holds of a manifest with a uid.
    """

    field: str
    node: str
    cel: str
    holds: Callable[[Values], bool]
    """The same statement in Python. May raise UnknownValueError."""
    message: str
    """What would be right, without the values."""
    message_cel: str | None = None
    """CEL that makes the message with the values in it."""
    says: Callable[[Values], str] | None = None
    """The same message in Python; `message` when unset."""

    def broken(self, values: Values) -> str | None:
        """What to say when the rule does not hold; None when it does, or cannot be judged."""
        try:
            if self.holds(values):
                return None
            return self.says(values) if self.says else self.message
        except UnknownValueError:
            return None
