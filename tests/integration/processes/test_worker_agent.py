"""A real worker process with a scripted coordinator: its whole life, broken sessions, and its end."""

import asyncio
import json
import signal
import socket
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.support.coordinator.scripted_coordinator import (
    PATIENCE,
    ScriptedCoordinator,
    ScriptedSession,
    worker_process,
)
from tests.support.loopback import free_address
from tests.support.model_folders.models import write_policy

from rlhf_api.protocol import PROTOCOL, mismatch
from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack, unpack
from rlhf_common.channels import aio_channel
from rlhf_common.names import Env
from rlhf_operator.certificates import new_authority
from rlhf_workers.inference.model_scorer import LogProbabilityScorer, ValueScorer
from rlhf_workers.models import loading as models
from rlhf_workers.peer_server import PeerServer, start_server
from rlhf_workers.sample_codec import scoring_sample_of
from rlhf_workers.weights.source import WeightSourceService

REWARD = """
def score(prompt, response, record):
    return None if response == "pass" else record["bonus"] + len(response)
"""
TASKS = ("reference", "values", "reward")


def job(folder: Path, **changes: Any) -> str:
    path = str(folder / "policy")
    sources = {"actor": {"path": path}, "critic": {"path": path}}
    reward = {"function": {"file": str(folder / "reward.py")}}
    spec = {
        "algorithm": {"ppo": {}},
        "deterministic": True,
        "models": {**sources, "reward": reward, **changes},
        "prompts": {"path": "prompts.jsonl"},
    }
    return json.dumps(
        {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "tiny"}, "spec": spec}
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_policy(tmp_path / "policy")
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path


def score_sample(number: int, response: list[int], text: str = "abc") -> pb.ScoreSample:
    return pb.ScoreSample(
        key=pb.SampleKey(iteration=0, sample=number, attempt=1),
        tasks=TASKS,
        prompt=pack(np.array([5, 6, 7], np.int32)),
        response=pack(np.array(response, np.int32)),
        prompt_text="1+1=",
        response_text=text,
        record='{"bonus": 0.5}',
    )


async def scored(session: ScriptedSession, count: int) -> dict[tuple[int, str], pb.ScoredSample]:
    return {(message.key.sample, message.task): message for message in await session.all("scored", count)}


class CriticStage:
    """A training rank's weights: the policy's backbone and a value head that is not zero.

    Readers wait until the stage is `open`.
    """

    def __init__(self, policy: Path) -> None:
        model = critic(policy)
        torch.nn.init.normal_(model.value_head.weight, generator=torch.Generator().manual_seed(5))
        self.parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self.model = model
        self.asked, self.open = asyncio.Event(), asyncio.Event()

    def tensors(self, model: str, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        assert (model, version) == ("critic", 1)
        yield from self.parameters.items()


class WaitingSource(WeightSourceService):
    """Describes at once; streams when the stage is opened."""

    def __init__(self, stage: CriticStage) -> None:
        super().__init__(lambda: stage)
        self._stage = stage

    async def Fetch(  # noqa: N802
        self, request: pb.WeightRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        self._stage.asked.set()
        await self._stage.open.wait()
        async for chunk in super().Fetch(request, context):
            yield chunk


def critic(policy: Path) -> models.ValueModel:
    return models.load_backbone_with_value_head(
        str(policy), field="", dtype=torch.float32, device=torch.device("cpu"), attention="eager"
    )


@asynccontextmanager
async def serving(stage: CriticStage, certificates: Path | None) -> AsyncIterator[PeerServer]:
    server = await start_server("127.0.0.1:0", certificates, WaitingSource(stage))
    try:
        yield server
    finally:
        await server.stop()


async def test_the_life_of_a_worker(folder: Path) -> None:
    """Register, score, survive a broken session idle and busy, and obey Exit while stuck; all over TLS."""
    certificates = folder / "certificates"
    renew(certificates)
    torch.set_num_threads(1)
    coordinator = ScriptedCoordinator()
    await coordinator.listen(certificates)
    metrics = free_address()
    stage = CriticStage(folder / "policy")
    environment = {Env.CERTIFICATES: str(certificates), Env.METRICS: metrics, Env.THREADS: "1"}
    async with (
        serving(stage, certificates) as peer,
        worker_process(coordinator.address, "inference", folder / "worker.log", **environment) as process,
    ):
        session = await coordinator.session()
        first = session.register
        check_first_register(first, process.pid)
        session.welcome(job(folder))
        session.send(1, become_inference=pb.BecomeInference(tasks=TASKS))
        assert not (await session.done(1)).HasField("failure")

        samples = [score_sample(0, [8, 9, 10, 1]), score_sample(1, [11], text="pass")]
        session.send(2, score=pb.Score(samples=samples))
        before = await scored(session, 6)
        check_scores(folder, samples, before, critic(folder / "policy"))
        beat = await session.first("heartbeat", lambda beat: beat.tokens > 0)
        assert beat.busy_seconds > 0
        await check_probes(first.address, certificates, metrics)

        # The coordinator is killed and restarts at its address; the worker keeps its state. Meanwhile the certificates
        # were renewed, and the old ones are no longer valid.
        await coordinator.stop()
        renew(certificates)
        await coordinator.listen(certificates, int(coordinator.address.rpartition(":")[2]))
        session = await coordinator.session()
        again = session.register
        assert again.incarnation == first.incarnation
        assert again.state == pb.WorkerState(roles=[pb.WORKER_ROLE_INFERENCE], versions={"critic": 0})
        await check_probes(first.address, certificates, metrics)
        session.welcome(job(folder), epoch=2)

        sources = [pb.WeightLocation(address=f"127.0.0.1:{peer.port}")]
        load = pb.LoadWeights(model="critic", version=1, sources=sources)
        session = await loads_across_sessions(coordinator, session, load, stage, samples, job(folder))
        session.send(5, score=pb.Score(samples=samples))
        after = await scored(session, 6)
        assert len([message for message in session.received if message.HasField("scored")]) == 6
        check_scores(folder, samples, after, stage.model)
        assert before[0, "reference"].result == after[0, "reference"].result

        stage.open.clear()
        stage.asked.clear()
        session.send(6, load_weights=load)
        await asyncio.wait_for(stage.asked.wait(), PATIENCE)
        session.send(7, exit=pb.Exit(code=75, reason="a peer was lost"))
        assert await asyncio.wait_for(process.wait(), PATIENCE) == 75
    await coordinator.stop()
    assert "exit 75: a peer was lost" in (folder / "worker.log").read_text()


def renew(certificates: Path) -> None:
    """Write certificates of a new authority: a process with only the old ones is refused."""
    now = datetime.now(UTC)
    new_authority("tiny", now).issue([], now).write(certificates)


def check_first_register(register: pb.Register, pid: int) -> None:
    """Check the Register of a process without any state."""
    assert (register.worker, register.group, register.index) == ("inference-0", "inference", 0)
    assert (register.device, register.pid) == ("cpu", pid)
    assert register.device_memory_bytes > 2**30
    assert register.state == pb.WorkerState()


async def loads_across_sessions(
    coordinator: ScriptedCoordinator, session: ScriptedSession, load: pb.LoadWeights, stage: CriticStage,
    samples: list[pb.ScoreSample], manifest: str,
) -> ScriptedSession:  # fmt: skip
    """Check that a load that waits for its peer survives a session, and that old samples are forgotten."""
    session.send(3, load_weights=load)
    session.send(4, score=pb.Score(samples=samples))
    await asyncio.wait_for(stage.asked.wait(), PATIENCE)
    session.end()
    session = await coordinator.session()
    assert session.register.state == pb.WorkerState(
        roles=[pb.WORKER_ROLE_INFERENCE],
        versions={"critic": 0},
        busy=True,
        command_id=3,
        command="load_weights",
    )
    session.welcome(manifest, epoch=2)
    stage.open.set()
    done = await session.done(3)
    assert done.load.version == 1
    assert done.load.bytes > 0
    return session


def check_scores(
    folder: Path, samples: list[pb.ScoreSample], scores: dict[tuple[int, str], pb.ScoredSample], value: Any
) -> None:
    """Compare bitwise with the results of the scorers in another process."""
    cpu = torch.device("cpu")
    path = str(folder / "policy")
    policy = models.load_causal_lm(path, field="", dtype=torch.float32, device=cpu, attention="eager")
    for message in samples:
        number = message.key.sample
        reference = LogProbabilityScorer(policy, 1.0, cpu, blocks=True).score([scoring_sample_of(message)])[0]
        values = ValueScorer(value, cpu, blocks=True).score([scoring_sample_of(message)])[0]
        assert unpack(scores[number, "reference"].result).tobytes() == reference.tobytes()
        assert unpack(scores[number, "values"].result).tobytes() == values.tobytes()
        assert all(scores[number, task].key == message.key for task in TASKS)
    assert unpack(scores[0, "reward"].result).tolist() == [3.5]
    assert scores[1, "reward"].abstained


async def check_probes(address: str, certificates: Path, metrics: str) -> None:
    """Check health on the worker's own server, and its Prometheus series."""
    async with aio_channel(address, certificates) as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://{metrics}/metrics").read().decode())
    assert 'rlhf_worker_tokens_total{group="inference",worker="inference-0"}' in text
    assert 'rlhf_worker_weight_version{group="inference",model="critic",worker="inference-0"} 0.0' in text


async def test_what_cannot_be_loaded_is_told_and_sigterm_ends_cleanly(folder: Path) -> None:
    """A failed role leaves a worker that can be told to retry."""
    coordinator = ScriptedCoordinator()
    await coordinator.listen(None)
    async with worker_process(coordinator.address, "inference", folder / "worker.log") as process:
        session = await coordinator.session()
        session.welcome(job(folder))
        session.send(1, score=pb.Score(samples=[score_sample(0, [8])]))
        assert (await session.done(1)).failure.reason == "WrongRole"
        (folder / "reward.py").write_text("def score(prompt, response, record)\n")
        session.send(2, become_inference=pb.BecomeInference(tasks=["reward"]))
        failure = (await session.done(2)).failure
        assert (failure.reason, failure.exit_code) == ("RewardFunctionInvalid", 20)
        assert failure.field == "spec.models.reward.function.file"
        assert "reward.py:1: SyntaxError" in failure.message
        weights = folder / "policy" / "model.safetensors"
        whole = weights.read_bytes()
        weights.write_bytes(whole[:-100])
        session.send(3, become_inference=pb.BecomeInference(tasks=["reference"]))
        failure = (await session.done(3)).failure
        assert (failure.reason, failure.exit_code, failure.field) == ("ModelCorrupt", 21, "spec.models.actor.path")
        weights.write_bytes(whole)
        (folder / "reward.py").write_text(REWARD)
        session.send(4, become_inference=pb.BecomeInference(tasks=TASKS))
        assert not (await session.done(4)).HasField("failure")
        session.end()
        session = await coordinator.session()
        session.welcome(job(folder))
        session.send(5, score=pb.Score(samples=[score_sample(0, [8])]))
        assert len(await scored(session, 3)) == 3
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), PATIENCE) == 0
    await coordinator.stop()


async def test_a_worker_of_another_manifest_asks_to_be_restarted(folder: Path) -> None:
    coordinator = ScriptedCoordinator()
    await coordinator.listen(None)
    async with worker_process(coordinator.address, "inference", folder / "worker.log") as process:
        session = await coordinator.session()
        session.welcome(job(folder))
        await session.first("heartbeat")
        session.end()
        session = await coordinator.session()
        session.welcome(job(folder, reference={"path": "/models/other"}))
        assert await asyncio.wait_for(process.wait(), PATIENCE) == 75
    await coordinator.stop()


def of_a_newer_version(text: str, **more: Any) -> str:
    """Return the same job as written by a newer coordinator."""
    document = json.loads(text)
    document["spec"] |= {"newBlock": {"mode": "Auto"}} | more
    document["spec"]["rollout"] = {"newField": 1}
    return json.dumps(document)


async def test_a_worker_works_with_the_coordinator_before_and_the_next_one(folder: Path) -> None:
    """Each coordinator restarts under the worker, which continues: unknown fields do not make it another job."""
    coordinator = ScriptedCoordinator()
    await coordinator.listen(None)
    async with worker_process(coordinator.address, "inference", folder / "worker.log") as process:
        for epoch, version in enumerate((PROTOCOL - 1, PROTOCOL, PROTOCOL + 1), 1):
            session = await coordinator.session()
            assert session.register.protocol == PROTOCOL
            session.welcome(of_a_newer_version(job(folder), another=epoch), epoch, version)
            session.send(epoch, become_inference=pb.BecomeInference(tasks=["reward"]))
            assert not (await session.done(epoch)).HasField("failure")
            session.end()
        assert process.returncode is None
    await coordinator.stop()


async def test_a_worker_of_a_distant_version_says_so_and_waits(folder: Path) -> None:
    coordinator = ScriptedCoordinator()
    await coordinator.listen(None)
    log = folder / "worker.log"
    async with worker_process(coordinator.address, "inference", log, **{Env.START_TIMEOUT: "1"}) as process:
        session = await coordinator.session()
        session.welcome(job(folder), protocol=PROTOCOL + 2)
        session = await coordinator.session()  # it dials again, after its start time-out
        assert mismatch("inference-0", PROTOCOL, PROTOCOL + 2) in log.read_text()
        session.welcome(job(folder))
        await session.first("heartbeat")
        assert process.returncode is None
    await coordinator.stop()


async def test_a_taken_port_is_exit_code_24_and_names_the_address(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        log = tmp_path / "worker.log"
        async with worker_process("127.0.0.1:9", "training", log, **{Env.LISTEN: address}) as process:
            assert await asyncio.wait_for(process.wait(), PATIENCE) == 24
    assert log.read_text().splitlines()[-1].endswith(f"RLHF_LISTEN={address}: the address is in use by another process")
