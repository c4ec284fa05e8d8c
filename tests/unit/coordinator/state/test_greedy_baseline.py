"""The last sample of each prompt is a greedy baseline: decoded and scored like others, but not counted."""

import struct
from pathlib import Path

from tests.support.coordinator.coordinated import make_job, make_prompts

from rlhf_api.algorithms import most_samples, samples_of_batch, samples_per_prompt
from rlhf_api.algorithms.graph import GENERATE, SCORE_REWARD, Graph
from rlhf_common import control_pb2 as pb
from rlhf_common.samples import VersionSpan
from rlhf_coordinator.job.iteration_metrics import batch_metrics
from rlhf_coordinator.scheduling.training_schedule import schedule_json
from rlhf_coordinator.state.job_state import job_context
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.sample import PackedResponse
from rlhf_coordinator.storage.batch import apply_record, batch_parts, replayed
from rlhf_coordinator.storage.journal_pb2 import Record
from rlhf_coordinator.storage.sample_codec import packed, span_messages

GRAPH = Graph("", (GENERATE, SCORE_REWARD))


def begun() -> Ledger:
    """Start two prompts with two samples and a greedy one each."""
    return Ledger(0, 6, (SCORE_REWARD,), 1, group_size=3, greedy_baseline=True)


def scored(ledger: Ledger, rewards: dict[int, float | None]) -> None:
    for index, reward in rewards.items():
        length = index + 1
        response = PackedResponse(bytes(4 * length), bytes(4 * length), (VersionSpan(0, length),))
        ledger.finish(index, ledger.assign(index, "w"), "w", response, "stop", "")
        value = None if reward is None else struct.pack("<f", reward)
        ledger.score(index, ledger.assign_scores(index, ["reward"], "s"), "s", "reward", value)


def test_the_last_sample_of_each_prompt_is_greedy_and_is_not_trained() -> None:
    ledger = begun()
    assert [sample.greedy for sample in ledger.samples] == [False, False, True] * 2
    scored(ledger, {index: float(index) for index in range(6)})
    ledger.train()
    assert ledger.counts()["trained"] == 4
    assert ledger.all_scored
    assert [sample.index for sample in ledger.trainable] == [0, 1, 3, 4]
    assert [sample.index for sample, _ in ledger.batch()] == list(range(6)), "the ranks are given its reward"


def test_its_reward_and_length_are_in_no_mean() -> None:
    ledger = begun()
    scored(ledger, {0: 1.0, 1: 2.0, 2: 100.0, 3: 3.0, 4: None, 5: None})
    metrics = batch_metrics(ledger, GRAPH)
    assert metrics["reward"] == 2.0
    assert metrics["reward_max"] == 3.0
    assert metrics["samples/abstained"] == 1
    assert metrics["response_tokens_mean"] == (1 + 2 + 4 + 5) / 4
    assert metrics["tokens"] == 21, "what was decoded"
    assert metrics["tokens_cut"] == metrics["samples/cut"] == 0


def test_without_one_no_sample_is_greedy() -> None:
    ledger = Ledger(0, 6, (SCORE_REWARD,), 1, group_size=3)
    assert ledger.trainable == ledger.samples
    assert not any(sample.greedy for sample in ledger.samples)


def test_a_batch_has_the_greedy_samples_beside_those_of_its_size(tmp_path: Path) -> None:
    job = make_job(tmp_path, algorithm="remax", batch=8)
    assert samples_per_prompt(job.spec) == 3
    assert most_samples(job.spec) == samples_of_batch(job.spec) == 12
    oversampled = make_job(tmp_path, algorithm="remax", rollout={"batchSize": 8, "oversample": 2}, deterministic=False)
    assert (most_samples(oversampled.spec), samples_of_batch(oversampled.spec)) == (18, 12)


def test_a_replay_gives_the_ranks_the_same_batch_byte_for_byte(tmp_path: Path) -> None:
    job = make_job(tmp_path, algorithm="remax", batch=4, training={"microBatchSize": 2})
    context, prompts = job_context(job, schedule_json(job.spec)), make_prompts(job)
    records = []
    for index in range(5):
        key, length = pb.SampleKey(iteration=0, sample=index, attempt=1), index + 1
        zeros, spans = bytes(4 * length), span_messages([VersionSpan(0, length)])
        finished = pb.FinishedSample(key=key, versions=spans, finish_reason="stop")
        finished.tokens.CopyFrom(packed("int32", zeros))
        finished.log_probabilities.CopyFrom(packed("float32", zeros))
        records.append(Record(finished=finished))
        for task in context.tasks:
            values = struct.pack("<f", index) if task.rewards else zeros
            scored = pb.ScoredSample(key=key, task=task.name, result=packed("float32", values))
            records.append(Record(scored=scored))
    records.append(Record(failed=pb.FailedSample(key=pb.SampleKey(iteration=0, sample=5))))
    live = Ledger(0, 6, context.tasks, 1, group_size=3, greedy_baseline=True)
    for record in records:
        apply_record(live, record)
    again = replayed(0, 6, context.tasks, records, prompts, 3, greedy_baseline=True)
    (part,) = batch_parts(live, prompts)
    assert [(sample.sample, sample.group, sample.abstained) for sample in part.samples] == [
        (0, 0, False), (1, 0, False), (2, 0, False), (3, 1, False), (4, 1, False), (5, 1, True)
    ]  # fmt: skip
    assert [part.SerializeToString()] == [other.SerializeToString() for other in batch_parts(again, prompts)]
    live.train()
    again.train()
    assert live.counts() == again.counts()
