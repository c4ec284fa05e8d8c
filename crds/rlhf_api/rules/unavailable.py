"""What the manifest can say and this version cannot do yet, in one table. Whoever lands a mode deletes its line."""

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
        """What to say when a manifest asks for it; None when it does not."""
        try:
            if values[self.field] != self.value:
                return None
        except UnknownValueError:
            return None
        return f"is not available in this version: use {self.instead}"


UNAVAILABLE: Final = (
    Unavailable("spec.generation.engine", "vllm", "torch"),
    Unavailable("spec.training.backend", "megatron", "torch"),
)
