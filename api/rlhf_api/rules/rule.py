"""One rule across fields, and how it reads a manifest. A rule is data: field, CEL, Python check, message."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


class UnknownValueError(LookupError):
    """A field that a rule reads is absent or invalid, so the rule cannot be checked."""


class Values:
    """A manifest with its defaults, read by path. Indexing raises UnknownValueError for an absent or invalid field."""

    def __init__(self, data: Mapping[str, Any], broken: Iterable[str] = ()) -> None:
        self._data = data
        self._broken = frozenset(broken)

    def __getitem__(self, path: str) -> Any:
        value = self._find(path)
        if value is None or any(field.startswith((f"{path}.", f"{path}[")) for field in self._broken):
            raise UnknownValueError(path)
        return value

    def has(self, path: str) -> bool:
        """Return whether a field is set. Raises UnknownValueError if it or a field around it is invalid."""
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

    A rule with `oldSelf` in its CEL gets it as an optional.
    """

    field: str
    """Path of the field to blame, such as `spec.rollout.batchSize`."""
    node: str
    """Path of the object that is `self` in CEL; empty for the whole job."""
    cel: str
    """The statement in CEL, for the API server."""
    holds: Callable[[Values], bool]
    """The same statement in Python. May raise UnknownValueError."""
    message: str
    """Message of a broken rule; it follows the name of the field and contains no values of the job."""
    message_cel: str | None = None
    """CEL expression of a message with values; `message` if unset."""
    says: Callable[[Values], str] | None = None
    """The message with values in Python; `message` if unset."""

    def broken(self, values: Values) -> str | None:
        """Return the message if the rule fails; None if it holds or cannot be checked."""
        try:
            if self.holds(values):
                return None
            return self.says(values) if self.says else self.message
        except UnknownValueError:
            return None
