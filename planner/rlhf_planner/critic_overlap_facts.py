"""Serializes measurements of the critics' overlap. Rule: pure."""

from collections.abc import Mapping
from typing import Any, Final

from rlhf_planner.critic_overlap_choice import MeasuredOverlap

JOB_KEY: Final = "criticOverlap"
"""Key in the journal's job facts."""


def document(measured: MeasuredOverlap, *, faster: bool) -> dict[str, Any]:
    """Return the measurements as plain data. `faster` is the last result of the comparison."""
    return {"measured": measured.document(), "faster": faster}


def read_facts(facts: Mapping[str, Any]) -> tuple[MeasuredOverlap, bool]:
    """Return (measurements, last result of the comparison). Raises ValueError for impossible measurements."""
    measured = facts.get("measured")
    if not isinstance(measured, Mapping):
        raise ValueError(f"{JOB_KEY}.measured: {measured!r} is no mapping")
    return MeasuredOverlap.from_document(measured), facts.get("faster") is True
