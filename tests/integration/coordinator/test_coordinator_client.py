"""The operator's side of a coordinator's service: readings and resizes over the job's own mutual TLS."""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.support.coordinator.coordinated import Coordinated, make_job
from tests.support.loopback import LOOPBACKS

from rlhf_operator import coordinator_client
from rlhf_operator.certificates import Certificates, new_authority
from rlhf_operator.coordinator_client import Coordinators


def certificates() -> Certificates:
    now = datetime.now(UTC)
    return new_authority("simulated", now).issue([], now)


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline, "timed out"
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("host", LOOPBACKS)
async def test_a_coordinator_is_read_and_told_its_sizes_by_the_holder_of_its_certificates(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listen as a pod does, at the address of a pod of either family."""
    monkeypatch.setattr(coordinator_client, "TIMEOUT_SECONDS", 60.0)
    ours = certificates()
    ours.write(tmp_path / "certificates")
    coordinated = Coordinated(make_job(tmp_path), tmp_path / "run", tmp_path / "certificates")
    port = coordinated.address.rpartition(":")[2]
    coordinated.address = f"[::]:{port}"
    coordinated.start()
    changed: list[str] = []
    readers = Coordinators(changed.append, int(port))
    try:
        readers.refresh("team/job", host, ours)
        await until(lambda: "team/job" in changed)
        reading, problem = readers.latest("team/job")
        assert problem == ""
        assert reading is not None
        assert (reading.phase, reading.iteration, reading.iterations) == ("Starting", 0, 3)
        assert reading.replicas == {"generation": 2, "inference": 2, "training": 2}
        assert any(item.startswith("generation-0 to register") for item in reading.waiting_for)
        readers.resize("team/job", {"generation": 5})
        await until(lambda: len(changed) >= 2)
        resized, _ = readers.latest("team/job")
        assert resized is not None
        assert resized.replicas["generation"] == 5

        readers.refresh("team/stranger", host, certificates())
        await until(lambda: "team/stranger" in changed)
        assert readers.latest("team/stranger") == (None, "its status could not be read (unavailable)")
    finally:
        await readers.close()
        await coordinated.cancel()
