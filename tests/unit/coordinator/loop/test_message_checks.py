"""Messages of workers are checked before use: an impossible message ends its session and nothing else."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_api.algorithms.graph import SCORE_REWARD
from rlhf_common import control_pb2 as pb
from rlhf_common.names import Group
from rlhf_coordinator.job.sample_messages import finished_response
from rlhf_coordinator.loop import score_handler
from rlhf_coordinator.loop.message_checks import check_message, check_registration
from rlhf_coordinator.state.worker import Worker
from rlhf_coordinator.storage.sample_codec import packed, response_of

NAME = "generation-2"


def span(**changes: Any) -> pb.WorkerMessage:
    fields: dict[str, Any] = {
        "worker": NAME,
        "name": "decode",
        "start_ns": 5,
        "end_ns": 9,
        "attributes": {"rows": "1.5", "peer": "a:1"},
    }
    return pb.WorkerMessage(span=pb.Span(**(fields | changes)))


def observation(start_ns: int = 5, end_ns: int = 9, **work: Any) -> pb.WorkerMessage:
    return pb.WorkerMessage(observation=pb.Observation(start_ns=start_ns, end_ns=end_ns, **work))


def rebuilt(seconds: float) -> pb.RebuildObservation:
    return pb.RebuildObservation(seconds=seconds)


def moved(**numbers: Any) -> pb.WorkerMessage:
    sample = pb.MigratedSample(moved=True, **numbers)
    return pb.WorkerMessage(done=pb.CommandDone(command_id=1, migrate=pb.MigrateResult(samples=[sample])))


NONSENSE: list[tuple[str, pb.WorkerMessage]] = [
    ("heartbeat.busy_seconds is nan", pb.WorkerMessage(heartbeat=pb.Heartbeat(busy_seconds=float("nan")))),
    ("heartbeat.tokens is -1", pb.WorkerMessage(heartbeat=pb.Heartbeat(tokens=-1))),
    ("span.worker is 'generation-0'", span(worker="generation-0")),
    ("span.name has 300 characters", span(name="x" * 300)),
    ("span.end_ns is 4", span(end_ns=4)),
    ("span.attributes[rows] is inf", span(attributes={"rows": "inf"})),
    ("observation.end_ns is 4", observation(end_ns=4)),
    ("observation.iteration is -1", observation(iteration=-1)),
    ("observation.decode.steps is -1", observation(decode=pb.DecodeObservation(steps=-1))),
    ("observation.decode.rows_per_step is nan", observation(decode=pb.DecodeObservation(rows_per_step=float("nan")))),
    ("observation.decode.keys_per_row is 1e+19", observation(decode=pb.DecodeObservation(keys_per_row=1e19))),
    ("observation.rebuild.seconds is inf", observation(rebuild=pb.RebuildObservation(seconds=float("inf")))),
    ("observation.scoring.tokens is 4611686018427387904", observation(scoring=pb.ScoringObservation(tokens=2**62))),
    ("observation.scoring.task has 300 characters", observation(scoring=pb.ScoringObservation(task="x" * 300))),
    ("observation.offload.role has 300 characters", observation(offload=pb.OffloadObservation(role="x" * 300))),
    (
        "observation.scoring.samples is 2000000000000000000",
        observation(scoring=pb.ScoringObservation(samples=2 * 10**18)),
    ),
    ("observation.rebuild.seconds is 86401.0, must be at most 86400", observation(rebuild=rebuilt(86401))),
    ("done.migrate.samples.seconds is 86401.0", moved(seconds=86401)),
    ("done.migrate.samples.paused_seconds is 1e+17", moved(paused_seconds=1e17)),
    ("done.migrate.samples.bytes is 4611686018427387904, must be at most 1.09951e+12", moved(bytes=2**62)),
    (
        "done.load.copy_seconds is 90000.0",
        pb.WorkerMessage(done=pb.CommandDone(command_id=1, load=pb.LoadResult(copy_seconds=90000))),
    ),
    (
        "done.measure.scoring.onload_seconds is 1000000000.0",
        pb.WorkerMessage(done=pb.CommandDone(measure=pb.MeasureResult(scoring=pb.ScoringCosts(onload_seconds=1e9)))),
    ),
    ("heartbeat.memory_bytes is 4611686018427387904", pb.WorkerMessage(heartbeat=pb.Heartbeat(memory_bytes=2**62))),
    ("observation.training_costs.rank is -1", observation(training_costs=pb.TrainingCostsObservation(rank=-1))),
    (
        "observation.training_costs.document has 70000 characters",
        observation(training_costs=pb.TrainingCostsObservation(document="x" * 70000)),
    ),
    ("prefix.dropped is -3", pb.WorkerMessage(prefix=pb.ScoredPrefix(dropped=[1, -3]))),
    (
        "done.load.seconds is inf",
        pb.WorkerMessage(done=pb.CommandDone(command_id=1, load=pb.LoadResult(seconds=float("inf")))),
    ),
    (
        "done.train.advantages is float32 [3]",
        pb.WorkerMessage(
            done=pb.CommandDone(
                command_id=1,
                train=pb.TrainResult(advantages=pb.Array(dtype="float32", shape=[3], data=bytes(8))),
            )
        ),
    ),
]


@pytest.mark.parametrize(("start", "message"), NONSENSE, ids=[start for start, _ in NONSENSE])
def test_a_message_without_sense_is_refused_with_its_field(start: str, message: pb.WorkerMessage) -> None:
    with pytest.raises(ValueError) as error:
        check_message(NAME, message)
    assert str(error.value).startswith(start)


def test_what_a_worker_says_every_day_passes() -> None:
    metrics = {"actor/loss": -0.5, "actor/kl": float("nan")}
    result = pb.TrainResult(iteration=1, version=2, metrics=metrics)
    failure = pb.Failure(reason="Internal", message="x" * 5000, exit_code=-9)
    for message in (
        span(),
        observation(),
        observation(1_790_000_000 * 10**9, 1_790_000_001 * 10**9),
        pb.WorkerMessage(heartbeat=pb.Heartbeat(busy_seconds=30 * 86400.0)),
        moved(bytes=2**33, seconds=4.0, paused_seconds=0.2),
        observation(decode=pb.DecodeObservation(steps=100, rows_per_step=0.5, keys_per_row=3e5, prefill_seconds=0.1)),
        pb.WorkerMessage(heartbeat=pb.Heartbeat(tokens=2**40, busy_seconds=3.5)),
        pb.WorkerMessage(done=pb.CommandDone(command_id=3, train=result)),
        pb.WorkerMessage(done=pb.CommandDone(command_id=3, failure=failure)),
    ):
        check_message(NAME, message)


@pytest.mark.parametrize(
    ("start", "state"),
    [
        ("state.group_epoch", pb.WorkerState(group_epoch=2**31 - 1)),
        ("state: version 101 of actor", pb.WorkerState(versions={"actor": 101})),
        ("state: version 101 of trained_version", pb.WorkerState(trained_version=101)),
        (
            "state.roles is training, and generation-2 holds no training rank",
            pb.WorkerState(roles=[pb.WORKER_ROLE_TRAINING]),
        ),
        ("state.roles holds 0", pb.WorkerState(roles=[pb.WORKER_ROLE_UNSPECIFIED])),
    ],
)
def test_a_worker_cannot_be_what_its_place_is_not(start: str, state: pb.WorkerState) -> None:
    """A rank's epoch counts up in 32 bits; accepting the highest one would end the coordinator."""
    worker = Worker(NAME, Group.GENERATION, 2)
    with pytest.raises(ValueError) as error:
        check_registration(worker, pb.Register(worker=NAME, state=state), 100)
    assert str(error.value).startswith(start)


def test_spans_of_versions_have_tokens() -> None:
    """A negative number is rejected; zero, as for a sample that moved before its first token, is ignored."""
    tokens, log_probabilities = packed("int32", b"\0" * 8), packed("float32", b"\0" * 8)
    with pytest.raises(ValueError, match="less than no token"):
        response_of(tokens, log_probabilities, [pb.VersionSpan(tokens=5), pb.VersionSpan(tokens=-3)])
    spans = [pb.VersionSpan(version=3, tokens=0), pb.VersionSpan(version=3, tokens=2)]
    assert response_of(tokens, log_probabilities, spans).versions == ((3, 2),)


@pytest.mark.parametrize(("field", "count"), [("drafted_tokens", -1), ("accepted_tokens", 2**62)])
def test_a_response_with_impossible_counts_of_draft_tokens_is_refused(field: str, count: int) -> None:
    tokens, log_probabilities = packed("int32", b"\0" * 4), packed("float32", b"\0" * 4)
    spans = [pb.VersionSpan(tokens=1)]
    message = pb.FinishedSample(
        tokens=tokens, log_probabilities=log_probabilities, finish_reason="stop", versions=spans
    )
    assert len(finished_response(message, 8)) == 1
    setattr(message, field, count)
    with pytest.raises(ValueError, match=f"{field} is {count}, must be from 0 to"):
        finished_response(message, 8)


@pytest.mark.parametrize("count", [-1, 31])
def test_a_score_with_an_impossible_count_of_early_tokens_is_refused(count: int) -> None:
    rollout = SimpleNamespace(max_prompt_tokens=10, max_response_tokens=20)
    run: Any = SimpleNamespace(context=SimpleNamespace(spec=SimpleNamespace(rollout=rollout)))
    samples: Any = SimpleNamespace(tasks=[SCORE_REWARD], name=lambda index: f"sample {index}")
    message = pb.ScoredSample(task="reward", early_tokens=count)
    with pytest.raises(ValueError, match=f"a score of sample 3: early_tokens is {count}, must be from 0 to 30"):
        score_handler.scored(run, samples, 3, NAME, message)
