"""What a job writes down of training with and without the critics' overlap: for its next process, and for `rlhf plan`.

Rule: pure. What cannot have been written is refused, so a damaged file costs measurements and nothing else.
"""

from collections.abc import Mapping
from typing import Any, Final

from rlhf_planner.critic_overlap_choice import MeasuredOverlap

JOB_KEY: Final = "criticOverlap"
"""Of the facts about the job in the journal."""


def document(measured: MeasuredOverlap, *, faster: bool) -> dict[str, Any]:
    """Return what is written down. `faster`: the overlap was last found to be."""
    return {"measured": measured.document(), "faster": faster}


def read_facts(facts: Mapping[str, Any]) -> tuple[MeasuredOverlap, bool]:
    """Return (what was measured, whether the overlap was last found to be faster). Raises ValueError."""
    measured = facts.get("measured")
    if not isinstance(measured, Mapping):
        raise ValueError(f"{JOB_KEY}.measured: {measured!r} is no mapping")
    return MeasuredOverlap.from_document(measured), facts.get("faster") is True
