"""Manifest values that this version does not support. Whoever implements one deletes its line."""

from dataclasses import dataclass
from typing import Final

from rlhf_api.rules.rule import UnknownValueError, Values


@dataclass(frozen=True)
class Unavailable:
    """A value of a field that is rejected for now."""

    field: str
    value: str
    instead: str
    """Supported alternative."""

    def broken(self, values: Values) -> str | None:
        """Return the message if a manifest uses the value; None otherwise."""
        try:
            if values[self.field] != self.value:
                return None
        except UnknownValueError:
            return None
        return f"is not available in this version: use {self.instead}"


UNAVAILABLE: Final[tuple[Unavailable, ...]] = ()
