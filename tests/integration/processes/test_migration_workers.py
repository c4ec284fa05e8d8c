"""Samples that move between real generation workers with their KV caches, with failures at any time.

One worker continues each sample, and its tokens and log-probabilities are those of an undisturbed one; with the torch
engine to the last bit.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from tests.support.workers.kv_peers import Link, PlayedSink, replay, serving
from tests.support.workers.migration_stage import RESPONSE, SLOTS, MigrationStage, caught, sample, set_up

from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack, unpack
from rlhf_common.channels import aio_channel
from rlhf_common.control_pb2_grpc import KvSinkStub

pytestmark = [pytest.mark.full, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["torch", "vllm"])
async def stage(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[MigrationStage]:
    """Yield two workers of one engine."""
    async with set_up(tmp_path_factory.mktemp("moves"), request.param) as migration_stage:
        yield migration_stage


TORCH_ALONE = pytest.mark.parametrize("stage", ["torch"], indirect=True)
"""Mark of tests that do not depend on the engine, or that vLLM does not support."""


# ---------------------------------------------------------------- without failures


async def test_a_sample_moves_while_it_is_decoded_and_its_source_forgets_it(stage: MigrationStage) -> None:
    for number in range(0, 10, 2):
        await stage.first.generate(sample(number), sample(number + 1))
        done = await stage.first.session.done(stage.first.migrate(stage.other.address, (number, 1, 2), (77, 1, 2)))
        moved, unknown = done.migrate.samples
        if moved.why != "it was finished meanwhile":
            break
    assert moved.moved, moved.why
    assert moved.key == pb.SampleKey(sample=number, attempt=1)
    tokens = len(unpack(moved.progress.tokens))
    assert moved.progress.key == pb.SampleKey(sample=number, attempt=2)
    assert (moved.progress.offset, moved.progress.versions[0].tokens) == (0, tokens)
    assert 0 < moved.paused_seconds <= moved.seconds
    positions = len(unpack(sample(number).prompt)) + tokens - 1
    assert moved.bytes == positions * 4 * 2 * 2 * 32 * 4  # layers, keys and values, heads, size, float32
    assert not unknown.moved
    assert unknown.why == "it is not held here"
    first = await stage.other.session.first("progress", lambda message: message.key == moved.progress.key)
    assert first == moved.progress
    stage.check(await stage.other.finished(number, 2))
    stage.check(await stage.first.finished(number + 1, 1))
    await stage.first.idle()
    assert not [
        message
        for message in stage.first.session.received
        if message.finished.key.sample == number and message.HasField("finished")
    ]
    spans = [
        await session.first("span", lambda span: (span.name, span.attributes["sample"]) == ("migrate", str(number)))
        for session in (stage.first.session, stage.other.session)
    ]
    assert [span.attributes["direction"] for span in spans] == ["out", "in"]
    assert {span.attributes["bytes"] for span in spans} == {str(moved.bytes)}


async def test_samples_move_there_and_back_and_one_that_waits_for_a_slot_moves_by_its_tokens(
    stage: MigrationStage,
) -> None:
    numbers = range(10, 16)  # more than there are slots: the last waits while the first are decoded
    done = await stage.first.ask(generate=pb.Generate(samples=[sample(number) for number in numbers]))
    assert not done.HasField("failure")
    await stage.first.session.first("progress", lambda message: message.key.sample == 13)
    answer = await stage.first.session.done(
        stage.first.migrate(stage.other.address, (10, 1, 2), (15, 1, 2), (11, 1, 2))
    )
    assert [moved.moved for moved in answer.migrate.samples] == [True] * 3
    waited = answer.migrate.samples[1]
    assert bool(waited.bytes) == bool(len(unpack(waited.progress.tokens))), "it has no cache before it is decoded"
    answer = await stage.other.session.done(stage.other.migrate(stage.first.address, (10, 2, 3)))
    back = answer.migrate.samples[0]
    if not back.moved:  # its former slots were taken meanwhile
        assert "no slot, or no room" in back.why
    for number in (12, 13, 14):
        stage.check(await stage.first.finished(number, 1))
    stage.check(await (stage.first if back.moved else stage.other).finished(10, 3 if back.moved else 2))
    for number in (11, 15):
        stage.check(await stage.other.finished(number, 2))
    await stage.first.idle()
    await stage.other.idle()


# ---------------------------------------------------------------- a destination that fails

FAULTS = [
    ("offer", "refuse", "told to refuse"),
    ("offer", "break", "internal: told to break"),
    ("offer", "hang", "no receipt within"),
    ("chunk", "refuse", "told to refuse"),
    ("chunk", "break", "internal: told to break"),
    ("chunk", "hang", "no receipt within"),
    ("hand-over", "refuse", "told to refuse"),
    ("hand-over", "break", "internal: told to break"),
    ("hand-over", "hang", "no receipt within"),
]


async def test_a_destination_that_fails_at_any_phase_leaves_the_sample_where_it_was(stage: MigrationStage) -> None:
    """This includes the hand-over: a lost receipt means not moved."""

    async def move(number: int, fault: str, how: str, why: str) -> None:
        sink = PlayedSink(fault, how)
        async with serving(sink, stage.certificates) as address:
            await stage.first.generate(sample(number))
            seconds = 2.0 if how == "hang" else 60.0
            answer = await stage.first.session.done(stage.first.migrate(address, (number, 1, 2), seconds=seconds))
            (result,) = answer.migrate.samples
            assert not result.moved
            assert why in result.why or "finished meanwhile" in result.why, (fault, how, result.why)
            assert not result.HasField("progress")
            stage.check(await stage.first.finished(number, 1))
            sink.go_on.set()

    for group in range(0, len(FAULTS), SLOTS):
        faults = FAULTS[group : group + SLOTS]
        await asyncio.gather(*(move(100 + group + n, *fault) for n, fault in enumerate(faults)))
    samples = [message.finished.key.sample for message in stage.first.session.received if message.HasField("finished")]
    assert [samples.count(100 + number) for number in range(len(FAULTS))] == [1] * len(FAULTS)
    await stage.first.idle()


@TORCH_ALONE
async def test_a_destination_that_is_not_there_or_is_cut_off(stage: MigrationStage) -> None:
    await stage.first.generate(sample(120), sample(121), sample(122))
    # Less than the cache of a sample of few tokens, which a fast machine moves as a whole before the link is cut.
    links = [Link(stage.other.address, 6_000), Link(stage.other.address, 6_000, breaks=False)]
    async with links[0].open() as breaking, links[1].open() as silent:
        identifiers = [
            stage.first.migrate(address, (number, 1, 2), seconds=3.0)
            for address, number in (("127.0.0.1:9", 120), (breaking, 121), (silent, 122))
        ]
        answers = [await stage.first.session.done(identifier) for identifier in identifiers]
        assert [answer.migrate.samples[0].moved for answer in answers] == [False] * 3
        why = answers[0].migrate.samples[0].why
        assert "unavailable" in why or "finished meanwhile" in why
    for number in (120, 121, 122):
        stage.check(await stage.first.finished(number, 1))
    await stage.other.idle()
    assert not [message for message in stage.other.session.received if message.progress.key.sample in (120, 121, 122)]


async def test_a_sample_that_is_withdrawn_or_finished_while_it_moves(stage: MigrationStage) -> None:
    sink = PlayedSink("hand-over", "hang")
    async with serving(sink, stage.certificates) as address:
        number, identifier = await caught(stage, 130, sink.reached, address)
        key = pb.SampleKey(sample=number, attempt=1)
        withdrawn = (await stage.first.ask(withdraw=pb.Withdraw(keys=[key]))).withdraw.samples
        (result,) = (await stage.first.session.done(identifier)).migrate.samples
        assert (result.moved, result.why) == (False, "it was withdrawn")
        await asyncio.wait_for(sink.ended.wait(), 60)
        sink.go_on.set()
    handed_over = next(part.hand_over for part in reversed(sink.parts) if part.HasField("hand_over"))
    assert unpack(withdrawn[0].tokens).tolist() == unpack(handed_over.sample.tokens).tolist()
    assert withdrawn[0].key == key
    wanted = stage.undisturbed(sample(number)).tokens
    assert unpack(withdrawn[0].tokens).tolist() == wanted[: len(unpack(withdrawn[0].tokens))].tolist()
    await stage.first.generate(sample(136))
    sink = PlayedSink("offer", "hang")
    async with serving(sink, stage.certificates) as address:
        (result,) = (await stage.first.session.done(stage.first.migrate(address, (136, 1, 2)))).migrate.samples
        assert (result.moved, result.why) == (False, "it was finished meanwhile")
        sink.go_on.set()
    stage.check(await stage.first.finished(136, 1))


# ---------------------------------------------------------------- a source that fails


async def recorded(stage: MigrationStage, number: int, attempt: int) -> list[pb.KvPart]:
    """Return the first worker's messages when it moves this sample; it forgets the sample."""
    sink = PlayedSink()
    async with serving(sink, stage.certificates) as address:
        for own in (1, 101, 102, 103):  # one that ends before it has moved is decoded again
            sink.parts.clear()
            await stage.first.generate(sample(number, attempt=own))
            answer = await stage.first.session.done(stage.first.migrate(address, (number, own, attempt)))
            if answer.migrate.samples[0].moved:
                return sink.parts
    raise AssertionError(answer.migrate.samples[0].why)


def changed(parts: list[pb.KvPart], index: int, **changes: Any) -> list[pb.KvPart]:
    """Return the messages with other fields in one of them."""
    part = pb.KvPart()
    part.CopyFrom(parts[index])
    inner = getattr(part, str(part.WhichOneof("part")))
    for name, value in changes.items():
        setattr(inner, name, value)
    return [*parts[:index], part, *parts[index + 1 :]]


async def test_what_is_damaged_incomplete_or_of_another_layout_is_refused_and_leaves_nothing(
    stage: MigrationStage,
) -> None:
    parts = await recorded(stage, 140, attempt=2)
    assert [part.WhichOneof("part") for part in (parts[0], parts[1], parts[-1])] == ["offer", "chunk", "hand_over"]
    positions = parts[-1].hand_over.positions
    faults = [
        (changed(parts, 1, crc32=1), "checksum is"),
        (changed(parts, 1, position=1), "came where position 0 was due"),
        (changed(parts, 1, layer=9), "the model has 4 layers"),
        (changed(parts, 0, layout="another"), "its cache has layout another"),
        (changed(parts, 0, version=3), "of weight version 3, this worker holds 0"),
        (changed(parts, -1 % len(parts), positions=positions + 1), "were handed over"),
        (parts[:-2] + parts[-1:], "were handed over"),
        (parts[:5], "ended the call before the hand-over"),
        (parts[1:], "a message of kind chunk came where offer was due"),
    ]
    for attempt, (messages, why) in enumerate(faults, start=3):
        messages = [pb.KvPart.FromString(part.SerializeToString()) for part in messages]
        if messages[0].HasField("offer"):
            messages[0].offer.sample.key.attempt = attempt
            if messages[-1].HasField("hand_over"):
                messages[-1].hand_over.sample.key.attempt = attempt
        receipt = await replay(stage.other.address, stage.certificates, messages)
        assert not receipt.accepted
        assert why in receipt.why
    await stage.other.idle()
    messages = [pb.KvPart.FromString(part.SerializeToString()) for part in parts]
    messages[0].offer.sample.key.attempt = messages[-1].hand_over.sample.key.attempt = 20
    receipt = await replay(stage.other.address, stage.certificates, messages)
    assert receipt.accepted, receipt.why
    receipt = await replay(stage.other.address, stage.certificates, messages)
    assert receipt.why == "attempt 20 has ended on this worker; its current attempt is 20"
    stage.check(await stage.other.finished(140, 20))


async def test_a_full_destination_refuses_before_bytes_are_sent_and_one_that_was_withdrawn_does_not_come(
    stage: MigrationStage,
) -> None:
    await stage.first.generate(sample(160))
    samples = [sample(150 + number) for number in range(SLOTS)]
    assert not (await stage.other.ask(generate=pb.Generate(samples=samples))).HasField("failure")
    answer = await stage.first.session.done(stage.first.migrate(stage.other.address, (160, 1, 2)))
    (result,) = answer.migrate.samples
    assert (result.moved, result.bytes) == (False, 0)
    assert result.why == "no slot, or no room for a cache, is free: 4 samples are held, others may be coming"
    await stage.first.withdraw(160)
    await stage.other.withdraw(*(150 + number for number in range(SLOTS)))
    parts = await recorded(stage, 161, attempt=5)
    await stage.other.ask(withdraw=pb.Withdraw(keys=[parts[0].offer.sample.key]))
    receipt = await replay(stage.other.address, stage.certificates, parts)
    assert receipt.why == "attempt 5 has ended on this worker; its current attempt is 5"


# ---------------------------------------------------------------- two roles in one process


@TORCH_ALONE
async def test_a_worker_generates_and_scores_and_says_what_both_cost(stage: MigrationStage) -> None:
    (stage.folder / "reward.py").write_text("def score(prompt, response, record):\n    raise SystemExit('called')\n")
    worker = stage.first
    tasks = ["reference", "reward"]
    done = await worker.ask(become_inference=pb.BecomeInference(tasks=tasks, offloaded=True))
    assert not done.HasField("failure"), done.failure
    generation = (await worker.ask(measure=pb.Measure(measurement_id=5, role="generation"))).measure
    assert {cost.batch for cost in generation.generation.decode} >= {1, SLOTS}
    assert (generation.measurement_id, generation.generation.max_batch_size, generation.generation.replays) == (
        5,
        SLOTS,
        True,
    )
    scoring = (await worker.ask(measure=pb.Measure(role="inference"))).measure.scoring
    assert [task.task for task in scoring.tasks] == ["reference"]
    assert all(cost.seconds > 0 for cost in scoring.tasks[0].costs)
    assert (await worker.ask(measure=pb.Measure())).failure.reason == "WrongRole"
    wanted = stage.undisturbed(sample(200))
    score = pb.ScoreSample(
        key=pb.SampleKey(sample=300, attempt=1),
        tasks=["reference"],
        prompt=sample(200).prompt,
        response=pack(wanted.tokens),
    )
    await worker.generate(sample(200))
    assert not (await worker.ask(score=pb.Score(samples=[score]))).HasField("failure")
    scored = await worker.session.first("scored", lambda message: message.key == score.key)
    assert len(unpack(scored.result)) == RESPONSE
    finished = await worker.finished(200, 1)
    stage.check(finished)
    assert np.allclose(unpack(scored.result), unpack(finished.log_probabilities), atol=1e-3)  # one model, one sample
    kinds = [message.WhichOneof("message") for message in worker.session.received]
    assert kinds.index("scored") > max(
        at for at, message in enumerate(worker.session.received) if message.finished.key.sample == 200
    )
    for role in ("generation", "inference"):
        assert not (await worker.ask(offload=pb.Offload(role=role))).HasField("failure")
    await worker.generate(sample(201))
    assert not (await worker.ask(score=pb.Score(samples=[score]))).HasField("failure")
    worker.session.end()
    await worker.next_session()
    assert worker.session.register.state == pb.WorkerState(
        roles=[pb.WORKER_ROLE_GENERATION, pb.WORKER_ROLE_INFERENCE],
        versions={"actor": 0},
    )
    assert [progress.key.sample for progress in worker.session.register.held] == [201]
    worker.session.welcome(worker.job)
    await worker.idle()


# ---------------------------------------------------------------- sessions that break, processes that die


async def test_a_session_that_breaks_during_a_transfer_ends_it_on_either_side(stage: MigrationStage) -> None:
    sink = PlayedSink("hand-over", "hang")
    async with serving(sink, stage.certificates) as address:
        number, _ = await caught(stage, 180, sink.reached, address)
        stage.first.session.end()
        await stage.first.next_session()
        await asyncio.wait_for(sink.ended.wait(), 60)
        sink.go_on.set()
    (progress,) = stage.first.session.register.held
    assert unpack(progress.tokens).tolist() == unpack(sink.parts[-1].hand_over.sample.tokens).tolist()
    assert (progress.key.sample, progress.key.attempt, progress.offset) == (number, 1, 0)

    # A destination without a session accepts nothing; in a new one it does.
    stage.first.session.welcome(stage.first.job)
    parts = await recorded(stage, 165, attempt=2)
    go_on = asyncio.Event()

    async def until_told() -> AsyncIterator[pb.KvPart]:
        for part in parts[:-1]:
            yield part
        await go_on.wait()

    async with aio_channel(stage.other.address, stage.certificates) as channel:
        call = KvSinkStub(channel).Receive(until_told(), timeout=60)
        await call.initial_metadata()
        stage.other.session.end()
        receipt = await call
        go_on.set()
    assert receipt.why == "the destination's session with the coordinator broke"
    await stage.other.next_session()
    assert not stage.other.session.register.held
    refused = await replay(stage.other.address, stage.certificates, parts)
    assert not refused.accepted
    stage.other.session.welcome(stage.other.job)
    parts[0].offer.sample.key.attempt = parts[-1].hand_over.sample.key.attempt = 3
    receipt = await replay(stage.other.address, stage.certificates, parts)
    assert receipt.accepted, receipt.why
    stage.check(await stage.other.finished(165, 3))


async def test_a_process_that_dies_during_a_transfer(stage: MigrationStage) -> None:
    """A killed destination leaves the sample at its source; from a killed source nothing arrives."""
    third = await stage.start(2)
    link = Link(third.address, 20_000, breaks=False)
    async with link.open() as address:
        number, identifier = await caught(stage, 170, link.reached, address)
        third.process.kill()
        await third.process.wait()
        link.cut()
        (result,) = (await stage.first.session.done(identifier)).migrate.samples
        assert not result.moved
    stage.check(await stage.first.finished(number, 1))
    link = Link(stage.other.address, 20_000, breaks=False)
    async with link.open() as address:
        number, _ = await caught(stage, 175, link.reached, address)
        stage.first.process.kill()
        await stage.first.process.wait()
        link.cut()
    await stage.other.idle()
    assert not [message for message in stage.other.session.received if message.progress.key.sample == number]
    await stage.other.generate(
        *(sample(190 + number) for number in range(SLOTS))
    )  # no slot is reserved for the dead source
    await stage.other.withdraw(*(190 + number for number in range(SLOTS)))
