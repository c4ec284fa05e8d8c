"""An unreachable coordinator costs little, and is contacted again when its pod changes."""

import asyncio
from datetime import UTC, datetime

import grpc
import pytest

from rlhf_common.control_pb2_grpc import CoordinatorStub
from rlhf_operator import coordinator_client
from rlhf_operator.certificates import Certificates, new_authority
from rlhf_operator.coordinator_client import Coordinators, pause


@pytest.fixture(scope="module")
def certificates() -> Certificates:
    now = datetime.now(UTC)
    return new_authority("job", now).issue([], now)


def test_attempts_without_an_answer_come_ever_less_often_and_never_stop() -> None:
    pauses = [pause(failures) for failures in range(1000)]
    assert pauses[0] == coordinator_client.READ_EVERY_SECONDS
    assert pauses == sorted(pauses)
    assert pauses[-1] == coordinator_client.LONGEST_PAUSE_SECONDS


async def test_silence_is_told_once_and_a_sign_of_life_is_followed_at_once(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_client, "READ_EVERY_SECONDS", 0.0)
    reported: list[str] = []
    attempts: list[object] = []
    coordinators = Coordinators(reported.append, port=1)  # nobody listens there

    def counted(channel: grpc.aio.Channel) -> object:
        attempts.append(0)
        return CoordinatorStub(channel)

    monkeypatch.setattr(coordinator_client, "CoordinatorStub", counted)

    async def until_asked(times: int) -> None:
        async with asyncio.timeout(60):
            while len(attempts) < times or not reported:  # noqa: ASYNC110 attempts are counted, not signalled
                await asyncio.sleep(0.01)

    coordinators.refresh("team/job", "127.0.0.1", certificates, "starting")
    await until_asked(3)
    monkeypatch.setattr(coordinator_client, "READ_EVERY_SECONDS", 9.0)
    await asyncio.sleep(0.2)
    assert coordinators.latest("team/job") == (None, "its status could not be read (unavailable)")
    assert reported == ["team/job"]
    attempts_before = len(attempts)
    coordinators.refresh("team/job", "127.0.0.1", certificates, "starting")
    await asyncio.sleep(0.2)
    assert len(attempts) == attempts_before
    coordinators.refresh("team/job", "127.0.0.1", certificates, "ready")
    await until_asked(attempts_before + 1)
    assert reported == ["team/job"]
    await coordinators.close()
