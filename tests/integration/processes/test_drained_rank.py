"""A real training rank that its machine asks to end: it reports that, waits for its coordinator, and ends when
released.
"""

import asyncio
import json
import signal
from pathlib import Path

import pytest
from tests.support.coordinator.scripted_coordinator import (
    PATIENCE,
    ScriptedCoordinator,
    ScriptedSession,
    worker_process,
)
from tests.support.model_folders.models import write_policy
from tests.support.training.training_ranks import make_job, serial

from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.names import Env, ExitCode

pytestmark = pytest.mark.full


async def become_rank(session: ScriptedSession, job: RLHFJob) -> None:
    session.welcome(json.dumps(job.model_dump(mode="json", by_alias=True)))
    become = pb.BecomeTraining(
        world_size=1,
        rendezvous=session.register.rendezvous,
        group_epoch=1,
        schedule=serial(job, 1, 1).model_dump_json(),
    )
    session.send(1, become_training=become)
    assert not (await session.done(1)).HasField("failure")


@pytest.mark.parametrize("way", ["let go", "alone", "out of grace"])
async def test_a_rank_stays_until_it_is_let_go_or_alone_or_out_of_grace(tmp_path: Path, way: str) -> None:
    policy = write_policy(tmp_path / "policy")
    job = make_job(policy, policy)
    coordinator = ScriptedCoordinator()
    await coordinator.listen(None)
    environment = {
        Env.RENDEZVOUS: "127.0.0.1",
        Env.GRACE: "22" if way == "out of grace" else "3600",
        Env.THREADS: "1",
    }
    async with worker_process(coordinator.address, "training", tmp_path / "log", **environment) as process:
        session = await coordinator.session()
        await become_rank(session, job)
        assert not (await session.first("heartbeat")).leaving
        process.send_signal(signal.SIGTERM)
        await session.first("heartbeat", lambda beat: beat.leaving)
        assert process.returncode is None or way == "out of grace"
        if way == "let go":
            # It still works: the coordinator saves its last checkpoint.
            session.send(2, save_checkpoint=pb.SaveCheckpoint(folder=str(tmp_path), iteration=0))
            assert (await session.done(2)).checkpoint.files
            session.send(3, exit=pb.Exit(code=0, reason="the job is Stopped"))
        elif way == "alone":
            await coordinator.stop()
        assert await asyncio.wait_for(process.wait(), PATIENCE) == ExitCode.OK
    if way != "alone":
        await coordinator.stop()


async def test_a_worker_that_holds_no_rank_ends_at_once(tmp_path: Path) -> None:
    policy = write_policy(tmp_path / "policy")
    job = make_job(policy, policy)
    coordinator = ScriptedCoordinator()
    await coordinator.listen(None)
    environment = {Env.GRACE: "3600"}
    async with worker_process(coordinator.address, "generation", tmp_path / "log", **environment) as process:
        session = await coordinator.session()
        session.welcome(json.dumps(job.model_dump(mode="json", by_alias=True)))
        await session.first("heartbeat")
        process.send_signal(signal.SIGTERM)
        assert await session.first("heartbeat", lambda beat: beat.leaving), "so no sample is blamed for its end"
        assert await asyncio.wait_for(process.wait(), PATIENCE) == ExitCode.OK
    await coordinator.stop()
