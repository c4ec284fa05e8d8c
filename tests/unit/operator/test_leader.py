"""Leader election: the holder of a Lease leads while it renews it in time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlhf_operator import leader
from rlhf_operator.__main__ import END_SECONDS
from rlhf_operator.api_client.errors import ConflictError, UnavailableError
from rlhf_operator.leader import Leader, LeaseLostError

Json = dict[str, Any]


class SlowLeases:
    """The API server's side of one Lease. Each request takes `seconds`. Replacements fail if `fails`; otherwise
    another operator takes the lease before the first one.

    Time is simulated: `asyncio.sleep` moves the clock.
    """

    def __init__(self, seconds: float, *, fails: bool = False) -> None:
        self.seconds, self.fails, self.now, self.written = seconds, fails, 0.0, 0.0
        self.lease: Json | None = None

    async def get(self, kind: str, namespace: str, name: str) -> Json | None:
        return self.lease

    async def create(self, manifest: Json) -> Json:
        self.lease, self.written = manifest, self.now
        self.now += self.seconds
        manifest["metadata"]["resourceVersion"] = "1"
        return manifest

    async def replace(self, manifest: Json) -> Json:
        self.now += self.seconds
        if self.fails:
            raise UnavailableError("slow")
        spec = {"holderIdentity": "two", "leaseDurationSeconds": leader.LEASE_SECONDS}
        self.lease = {"metadata": {"resourceVersion": "7"}, "spec": spec}
        raise ConflictError("taken")


async def seconds_until_lost(leases: SlowLeases, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the time from the last write of the lease until the leader gave up."""

    async def sleep(seconds: float) -> None:
        leases.now += seconds

    result = Leader(leases, "team", "one", clock=lambda: leases.now)  # type: ignore[arg-type]
    await result.acquire()
    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(LeaseLostError, match=f"was not renewed {'for' if leases.fails else 'in time: another'}"):
        await result.hold()
    return leases.now - leases.written


class Leases:
    """The API server's side of one Lease; the first `hang` replacements hang."""

    def __init__(self, hang: int) -> None:
        self.hang, self.renewed = hang, 0
        self.lease: Json | None = None
        self.again = asyncio.Event()
        """Set after a second renewal."""

    async def get(self, kind: str, namespace: str, name: str) -> Json | None:
        return self.lease

    async def create(self, manifest: Json) -> Json:
        self.lease = manifest
        return {"metadata": {"resourceVersion": "1"}}

    async def replace(self, manifest: Json) -> Json:
        if self.hang:
            self.hang -= 1
            await asyncio.sleep(3600)
        self.renewed += 1
        if self.renewed > 1:
            self.again.set()
        return {"metadata": {"resourceVersion": str(self.renewed + 1)}}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("RENEW_DEADLINE", 1.0), ("ATTEMPT_SECONDS", 0.5), ("RETRY_SECONDS", 0.05)):
        monkeypatch.setattr(leader, name, seconds)


async def led(leases: Any) -> None:
    result = Leader(leases, "team", "one")
    await result.acquire()
    await result.hold()


def test_a_renewal_that_hangs_leaves_time_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "RENEW_DEADLINE", 120.0)
    leases = Leases(hang=1)

    async def run() -> None:
        leading = asyncio.create_task(led(leases))
        await asyncio.wait_for(leases.again.wait(), 60)
        assert not leading.done()
        leading.cancel()

    asyncio.run(run())


def test_a_leader_whose_renewals_all_hang_gives_up_in_time() -> None:
    with pytest.raises(LeaseLostError, match="team/rlhf-operator was not renewed for 1 s"):
        asyncio.run(asyncio.wait_for(led(Leases(hang=1000)), 60))


@pytest.mark.parametrize("seconds", [0.0, 0.03, 0.17, 0.3])
def test_a_leader_gives_up_within_the_deadline_after_its_last_renewal(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(leader, "RETRY_SECONDS", 0.35)
    leases = SlowLeases(seconds, fails=True)
    lost = asyncio.run(seconds_until_lost(leases, monkeypatch))
    assert lost <= leader.RENEW_DEADLINE + seconds, "an attempt in progress is cancelled by its time-out"


def test_a_leader_whose_lease_another_operator_took_gives_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "RENEW_DEADLINE", 100.0)
    assert asyncio.run(seconds_until_lost(SlowLeases(0.0), monkeypatch)) < 1


def test_a_leader_that_lost_its_lease_has_ended_before_another_may_start() -> None:
    assert leader.RENEW_DEADLINE + END_SECONDS < leader.LEASE_SECONDS
