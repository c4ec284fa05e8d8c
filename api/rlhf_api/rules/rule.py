"""One rule that crosses fields, and how it reads a manifest. A rule is data: field, CEL, Python check, message."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


class UnknownValueError(LookupError):
    """A field that a rule reads is absent, or wrong by itself, so the rule cannot be judged."""


class Values:
    """A manifest with its defaults, read by path. Reading a wrong field raises UnknownValueError."""

    def __init__(self, data: Mapping[str, Any], broken: Iterable[str] = ()) -> None:
        self._data = data
        self._broken = frozenset(broken)

    def __getitem__(self, path: str) -> Any:
        value = self._find(path)
        if value is None or any(field.startswith((f"{path}.", f"{path}[")) for field in self._broken):
            raise UnknownValueError(path)
        return value

    def has(self, path: str) -> bool:
        """Return whether a field is set. Raises UnknownValueError when something around it is wrong."""
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
    """One statement about a job.

    A rule that uses `oldSelf` as an optional is about new jobs alone, so it holds for a manifest with a uid.
    """

    field: str
    """Path of the field to blame, such as `spec.rollout.batchSize`."""
    node: str
    """Path of the object that the CEL is written over, as `self`; empty for the whole job."""
    cel: str
    """The statement in CEL, for the API server."""
    holds: Callable[[Values], bool]
    """The same statement in Python. May raise UnknownValueError."""
    message: str
    """What would be right; it follows the name of the field and does not name values."""
    message_cel: str | None = None
    """CEL expression of a message with the values in it; `message` when unset."""
    says: Callable[[Values], str] | None = None
    """The message with the values in Python; `message` when unset."""

    def broken(self, values: Values) -> str | None:
        """Return the message when the rule does not hold; None when it holds, or cannot be judged."""
        try:
            if self.holds(values):
                return None
            return self.says(values) if self.says else self.message
        except UnknownValueError:
            return None
