"""Jobs as a real API server answered them, with their pods, events, Lease, log and metrics: `seen/<state>.json`."""

import json
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlhf_cli.cluster import facts
from rlhf_cli.cluster.describe import Facts
from rlhf_cli.cluster.stored import Stored
from rlhf_cli.cluster.timeline import iterations
from rlhf_cli.cluster.workers import workers

FOLDER = Path(__file__).parent / "seen"
STATES = sorted(path.stem for path in FOLDER.glob("*.json"))


@lru_cache
def _text(state: str) -> str:
    return (FOLDER / f"{state}.json").read_text()


def load(state: str) -> dict[str, Any]:
    """A fresh copy, to be changed at will."""
    found: dict[str, Any] = json.loads(_text(state))
    return found


def facts_of(seen: dict[str, Any]) -> tuple[Facts, datetime]:
    """What describe shows, and when it was read."""
    now = datetime.fromisoformat(seen["now"])
    pods = workers(seen["pods"], seen["events"], now)
    age = facts.operator_age(seen["leases"], now)
    return Facts(Stored(seen["job"]), pods, seen["events"], iterations(seen["log"]), age), now
