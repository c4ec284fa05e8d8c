"""10,000 messages that none of our processes would send, to a real coordinator and to real workers.

No process dies or hangs, a sender without a certificate of the job changes nothing, and concurrent work is not
affected.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support.coordinator.coordinated import expected_weights, prompts_of, write_files
from tests.support.coordinator.coordinator_process import CoordinatorProcess
from tests.support.coordinator.fuzzed import bytes_of, register, worker_messages
from tests.support.coordinator.simulated_rank import Pace
from tests.support.coordinator.simulated_worker import Crew, crew
from tests.support.workers.kv_peers import PlayedSink, serving
from tests.support.workers.migration_stage import MigrationStage, sample, set_up

from rlhf_common import control_pb2 as pb
from rlhf_common.channels import MAX_MESSAGE_BYTES, OPTIONS, SERVER_NAME, aio_channel
from rlhf_common.control_pb2_grpc import CoordinatorStub
from rlhf_common.names import Env, ExitCode, Group
from rlhf_operator.certificates import new_authority

pytestmark = pytest.mark.full


COUNTS = {Group.GENERATION: 2, Group.INFERENCE: 2, Group.TRAINING: 2}
"""Workers of the crew; the job wants a third generation worker, whose name the messages use."""
SESSIONS = 500
MESSAGES = 12
"""Messages of a session, after Register."""
CALLS = 1200
STRANGERS = 400
"""Calls of each kind without a certificate of the job."""
ANSWER_SECONDS = 120.0
"""Deadline in seconds that only a hanging call reaches, on a busy machine too."""
SERVICE = "/rlhf.v1.Coordinator/"


def certified(folder: Path) -> Path:
    now = datetime.now(UTC)
    folder.mkdir(exist_ok=True)
    new_authority("simulated", now).issue([], now).write(folder)
    return folder


def bare_channel(address: str, authority: bytes | None) -> grpc.aio.Channel:
    """Return a channel without a client certificate that trusts the server's, or without encryption."""
    options = [*OPTIONS, ("grpc.ssl_target_name_override", SERVER_NAME)]
    if authority is None:
        return grpc.aio.insecure_channel(address, options=OPTIONS)
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(authority), options=options)


def unlimited_channel(address: str, certificates: Path) -> grpc.aio.Channel:
    """Return a channel that sends messages of any size."""
    authority, certificate, key = ((certificates / name).read_bytes() for name in ("ca.crt", "tls.crt", "tls.key"))
    options = [("grpc.max_send_message_length", -1), ("grpc.ssl_target_name_override", SERVER_NAME)]
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(authority, key, certificate), options=options)


def raw(method: Any) -> Any:
    """Return a method without serializers, which takes and returns bytes; gRPC's types do not express that."""
    return method


async def outcome(call: Any) -> grpc.StatusCode:
    """Return how a call ended; a hanging one fails the test."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            code: grpc.StatusCode = await call.code()
            return code
    finally:
        call.cancel()


async def unary(channel: grpc.aio.Channel, method: str, data: bytes) -> grpc.StatusCode:
    return await outcome(raw(channel.unary_unary(SERVICE + method))(data, timeout=ANSWER_SECONDS))


async def stream(channel: grpc.aio.Channel, method: str, data: bytes) -> grpc.StatusCode:
    """Read the first answers of a streaming call; WatchStatus has no end."""
    call = raw(channel.unary_stream(SERVICE + method))(data, timeout=ANSWER_SECONDS)
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            if await call.read() is not grpc.aio.EOF:
                return grpc.StatusCode.OK
    except grpc.RpcError:
        pass
    return await outcome(call)


async def session(channel: grpc.aio.Channel, messages: list[bytes]) -> tuple[grpc.StatusCode, str]:
    """Run one session with these messages, then close our side."""
    call = raw(channel.stream_stream(SERVICE + "Session"))(timeout=ANSWER_SECONDS)
    try:
        for data in messages:
            await call.write(data)
        await call.done_writing()
    except (grpc.RpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
        pass  # ended by the other side
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            while await call.read() is not grpc.aio.EOF:
                pass
    except grpc.RpcError:
        pass
    code = await outcome(call)
    return code, str(await call.details())


def messages_of(rng: random.Random, number: int) -> list[bytes]:
    """Return a session's messages, mostly with a valid Register, so that the rest is processed."""
    first = register(number)
    opening = first.SerializeToString() if rng.random() < 0.8 else b""
    data = [pb.WorkerMessage(register=first).SerializeToString() if opening else _odd_register(rng, number)]
    for _ in range(MESSAGES):
        kind = rng.choice(worker_messages(rng.randrange(100)))
        data.append(_harmless(bytes_of(rng, kind)))
    return data


def _odd_register(rng: random.Random, number: int) -> bytes:
    data = bytes_of(rng, pb.WorkerMessage(register=register(number)))
    return _harmless(data)


def _harmless(data: bytes) -> bytes:
    """Remove messages that a worker of the job may rightly send.

    They are a failure that ends the job, a report that it already decodes, and its initial samples.
    """
    try:
        message = pb.WorkerMessage.FromString(data)
    except Exception:
        return data
    for item in (message, *message.batch.messages):
        if item.HasField("done"):
            item.done.failure.retryable = True
        if item.HasField("register"):
            del item.register.held[:]
            del item.register.state.roles[:]
    return message.SerializeToString()


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[CoordinatorProcess]:
    coordinator = CoordinatorProcess(tmp_path)
    yield coordinator
    if coordinator.process is not None and coordinator.process.poll() is None:
        coordinator.kill()


async def many(count: int, at_once: int, call: Callable[[int], Any]) -> list[Any]:
    """Return the results of `call` for 0 .. count-1, with at most `at_once` in flight."""
    slots = asyncio.Semaphore(at_once)

    async def slotted(number: int) -> Any:
        async with slots:
            return await call(number)

    return await asyncio.gather(*(slotted(number) for number in range(count)))


async def strangers(process: CoordinatorProcess, tmp_path: Path) -> None:
    """Assert that a client without a certificate of the job learns nothing and changes nothing."""
    theirs, ours = certified(tmp_path / "theirs"), (tmp_path / "certificates" / "ca.crt").read_bytes()
    rng = random.Random(1)
    calls: list[tuple[str, bytes]] = [
        ("Stop", pb.StopRequest(checkpoint=True, reason="a stranger").SerializeToString()),
        ("Resize", pb.ResizeRequest(replicas={"generation": 7}).SerializeToString()),
        ("GetStatus", b""),
    ]

    async def attempt(channel: grpc.aio.Channel, number: int) -> grpc.StatusCode:
        if number % 4 == 3:
            return (await session(channel, messages_of(rng, number)))[0]
        return await unary(channel, *calls[number % 4])

    for channel in (
        aio_channel(process.address, theirs),
        bare_channel(process.address, ours),
        bare_channel(process.address, None),
    ):
        async with channel:
            codes = await many(STRANGERS, 32, partial(attempt, channel))
        assert set(codes) == {grpc.StatusCode.UNAVAILABLE}


async def finish(workers: Crew) -> str:
    await workers.end()
    (weights,) = {workers[f"training-{rank}"].weights for rank in (0, 1)}
    return weights


async def test_a_coordinator_and_ten_thousand_messages(process: CoordinatorProcess, tmp_path: Path) -> None:
    certificates = certified(tmp_path / "certificates")
    policy = {"workerTimeoutSeconds": 120, "startTimeoutSeconds": 600, "backoffLimit": 1000}
    job = write_files(
        tmp_path, iterations=40, batch=24, generation={"replicas": 3, "maxBatchSize": 6}, runPolicy=policy
    )
    process.start({Env.CERTIFICATES: str(certificates)})
    pace = Pace(tokens_per_tick=1, train_seconds=0.2)
    workers = crew(COUNTS, process.address, pace=pace, certificates=certificates)

    async def stay() -> None:
        """Keep the job running until all messages are sent."""
        await process.until_iteration(30, certificates=certificates)
        pace.tokens_per_tick = 0

    await process.until_iteration(1, certificates=certificates)
    staying = asyncio.create_task(stay())
    await strangers(process, tmp_path)
    run = tmp_path / "run"
    whole = (run / "events.jsonl").read_text().rpartition("\n")[0]  # the last line may be incomplete
    kinds = {json.loads(line)["kind"] for line in whole.splitlines()}
    assert not kinds & {"stop", "resize", "worker-refused", "bad-message"}, "a stranger changed something"

    begun, rng = time.monotonic(), random.Random(2)
    async with aio_channel(process.address, certificates) as channel:
        await many(CALLS, 16, lambda number: call_of(channel, rng, number))
        ended = await many(SESSIONS, 8, lambda number: session(channel, messages_of(rng, number)))
        async with unlimited_channel(process.address, certificates) as wide:
            ended.append(await session(wide, [b"x" * (MAX_MESSAGE_BYTES + 1)]))
        assert ended[-1][0] == grpc.StatusCode.RESOURCE_EXHAUSTED
        for code, why in ended:
            assert code is grpc.StatusCode.OK or why, f"{code} says nothing"
        assert grpc.StatusCode.UNKNOWN not in {code for code, _ in ended}
        status = await CoordinatorStub(channel).GetStatus(pb.GetStatusRequest(), timeout=ANSWER_SECONDS)
        assert sum(status.ledger.values()) == job.spec.rollout.batch_size
        assert dict(status.replicas) == {"generation": 3, "inference": 2, "training": 2}
    staying.cancel()
    pace.tokens_per_tick = 8
    print(f"{CALLS} calls and {SESSIONS} sessions in {time.monotonic() - begun:.1f} s")
    assert CALLS + SESSIONS * (MESSAGES + 1) + 3 * STRANGERS >= 8_000
    assert await process.code() == ExitCode.OK, process.last_line
    assert await finish(workers) == expected_weights(job, prompts=prompts_of(job))
    log = (tmp_path / "log").read_text()
    assert "could not be processed" not in log, "every refusal is one that somebody thought of"


async def call_of(channel: grpc.aio.Channel, rng: random.Random, number: int) -> grpc.StatusCode:
    """Make one of the calls that are not sessions."""
    match number % 4:
        case 0:
            return await unary(channel, "GetStatus", bytes_of(rng, pb.GetStatusRequest()) if number % 8 else b"\xff")
        case 1:
            return await stream(channel, "WatchStatus", bytes_of(rng, pb.WatchStatusRequest(max_rate_hz=1)))
        case 2:
            return await stream(channel, "FetchBatch", bytes_of(rng, pb.FetchBatchRequest(iteration=1)))
        case _:
            group, count = rng.choice([("generation", -1), ("generation", 2**31 - 1), ("x" * 9000, 1), ("training", 3)])
            wanted = pb.ResizeRequest(replicas={group: count})
            code = await unary(channel, "Resize", wanted.SerializeToString() + b"\xba\x3e\x03abc")
            assert code == grpc.StatusCode.INVALID_ARGUMENT
            return code


# ---------------------------------------------------------------- workers

TRANSFERS = 350
PARTS = 6
"""Most parts of a transfer."""
READS = 400
WEIGHTS = "/rlhf.v1.WeightSource/"


async def recorded(stage: MigrationStage) -> tuple[int, list[pb.KvPart]]:
    """Return a sample and the recorded messages of its move, without the receiver's name."""
    for number in range(40, 45):  # one that is finished before it was handed over says nothing of it
        sink = PlayedSink("hand-over", "refuse")
        async with serving(sink, stage.certificates) as address:
            await stage.other.generate(sample(number))
            answer = await stage.other.session.done(stage.other.migrate(address, (number, 1, 2)))
        assert not answer.migrate.samples[0].moved
        if sink.reached.is_set():
            assert {part.WhichOneof("part") for part in sink.parts} == {"offer", "chunk", "hand_over"}
            return number, sink.parts
    raise AssertionError("every sample was finished before it got so far")


async def transfer(channel: grpc.aio.Channel, parts: list[bytes]) -> pb.KvReceipt | grpc.StatusCode:
    """Make one call to a KvSink; return its receipt, or how it ended."""
    call = raw(channel.stream_unary("/rlhf.v1.KvSink/Receive", response_deserializer=pb.KvReceipt.FromString))(
        timeout=ANSWER_SECONDS
    )
    try:
        for part in parts:
            await call.write(part)
        await call.done_writing()
    except (grpc.RpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
        pass
    code = await outcome_of(call)
    return await call if code is grpc.StatusCode.OK else code


async def numbered_transfer(
    channel: grpc.aio.Channel, parts: list[bytes], number: int
) -> pb.KvReceipt | grpc.StatusCode:
    """Make the same transfer, for any number."""
    return await transfer(channel, parts)


async def outcome_of(call: Any) -> grpc.StatusCode:
    async with asyncio.timeout(ANSWER_SECONDS):
        code: grpc.StatusCode = await call.code()
        return code


def parts_of(rng: random.Random, good: list[pb.KvPart], number: int) -> list[bytes]:
    """Return a transfer that must fail: parts are changed, and at least one part of the cache is missing."""
    offer, chunks = good[0], [part for part in good if part.HasField("chunk")]
    result = [offer, *rng.sample(chunks, min(len(chunks) - 1, rng.randrange(PARTS - 1))), good[-1]]
    wrong = rng.randrange(len(result))
    data = []
    for place, part in enumerate(result):
        damaged = pb.KvPart.FromString(part.SerializeToString())
        if damaged.HasField("offer"):
            damaged.offer.sample.key.sample = 1000 + number
        data.append(bytes_of(rng, damaged) if place == wrong else damaged.SerializeToString())
    return data


async def read(channel: grpc.aio.Channel, rng: random.Random, number: int) -> grpc.StatusCode:
    """Read weights that this worker does not have."""
    data = bytes_of(rng, pb.WeightRequest(model="actor", version=number % 3))
    kinds: tuple[Any, Any] = (channel.unary_unary, channel.unary_stream)
    call = kinds[number % 2](WEIGHTS + ("Describe", "Fetch")[number % 2])(data, timeout=ANSWER_SECONDS)
    return await outcome(call)


async def test_workers_and_what_their_peers_send(tmp_path: Path) -> None:
    async with set_up(tmp_path) as stage:
        (moving, good), rng = await recorded(stage), random.Random(3)
        address, whole = stage.first.address, [part.SerializeToString() for part in good]
        await stage.first.generate(sample(0), sample(1))
        theirs = certified(tmp_path / "theirs")
        for stranger in (
            aio_channel(address, theirs),
            bare_channel(address, (stage.certificates / "ca.crt").read_bytes()),
            bare_channel(address, None),
        ):
            async with stranger:
                refused = await many(50, 8, partial(numbered_transfer, stranger, whole))
                refused += await many(50, 8, partial(read, stranger, rng))
            assert set(refused) == {grpc.StatusCode.UNAVAILABLE}
        async with aio_channel(address, stage.certificates) as channel:
            result = await many(TRANSFERS, 8, lambda number: transfer(channel, parts_of(rng, good, number)))
            await many(READS, 16, lambda number: read(channel, rng, number))
        receipts = [item for item in result if isinstance(item, pb.KvReceipt)]
        assert receipts
        assert not any(receipt.accepted for receipt in receipts)
        assert all(receipt.why for receipt in receipts), "a refusal says why"
        for number in (0, 1):
            stage.check(await stage.first.finished(number, 1))
        stage.check(await stage.other.finished(moving, 1))
        await idle_at_last(stage)
        assert stage.first.process.returncode is None


async def idle_at_last(stage: MigrationStage) -> None:
    """Assert that a failed transfer leaves nothing in the worker."""
    beats: list[pb.Heartbeat] = []
    async with asyncio.timeout(ANSWER_SECONDS):
        while not beats or beats[-1].active_samples:
            beats = await stage.first.session.all("heartbeat", len(beats) + 1)
