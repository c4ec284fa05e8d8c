"""Values that the manifest has and that this version cannot do yet. Whoever implements one deletes its line."""

from dataclasses import dataclass
from typing import Final

from rlhf_api.rules.rule import UnknownValueError, Values


@dataclass(frozen=True)
class Unavailable:
    """A value of a field that is refused for now."""

    field: str
    value: str
    instead: str
    """What to use instead."""

    def broken(self, values: Values) -> str | None:
        """Return the message when a manifest asks for the value; None when it does not."""
        try:
            if values[self.field] != self.value:
                return None
        except UnknownValueError:
            return None
        return f"is not available in this version: use {self.instead}"


UNAVAILABLE: Final[tuple[Unavailable, ...]] = ()
