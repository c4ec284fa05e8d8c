"""The names of what a rank's schedule row did, as the timeline draws it.

Rule: pure; a span is named for its pipeline and what was done, waits for peers among it.
"""

from typing import Final

from rlhf_api.schedule import Action, ScheduleTable

NAMES: Final = {"F": "F", "B": "B", "I": "I", "W": "W", "RECV_F": "wait-F", "RECV_B": "wait-B"}
"""Action kind -> last part of its span's name."""


def name_of(action: Action, table: ScheduleTable) -> str:
    """Return the name of an action's span."""
    return f"train/{table.pipelines[action.pipeline].name}/{NAMES[action.kind]}"
