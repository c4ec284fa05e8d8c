"""Oversampled prompts: which are cut off and when; a replay leaves out the same ones."""

from pathlib import Path

from tests.support.coordinator.coordinated import make_job, make_prompts

from rlhf_api.algorithms import most_samples
from rlhf_api.algorithms.graph import SCORE_REWARD
from rlhf_common import control_pb2 as pb
from rlhf_common.samples import VersionSpan
from rlhf_coordinator.scheduling import oversampling
from rlhf_coordinator.scheduling.training_schedule import schedule_json
from rlhf_coordinator.state.job_state import job_context
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.sample import PackedResponse, SampleState
from rlhf_coordinator.storage.batch import apply_record, batch_parts, replayed
from rlhf_coordinator.storage.journal_pb2 import Cut, Record
from rlhf_coordinator.storage.sample_codec import packed, span_messages, unpacked

ONE = PackedResponse(b"\1\0\0\0", b"\0\0\0\0", (VersionSpan(0, 1),))


def finished(ledger: Ledger, *indices: int) -> None:
    for index in indices:
        ledger.finish(index, ledger.assign(index, "w"), "w", ONE, "stop", "")


def begun(spare: int = 4) -> Ledger:
    """Start four prompts of two samples each."""
    return Ledger(0, 8, (SCORE_REWARD,), 1, group_size=2, spare=spare)


def test_nothing_is_cut_off_before_enough_prompts_are_finished_whole() -> None:
    ledger = begun()
    finished(ledger, 0, 2, 4, 6, 7)
    assert ledger.finished_groups() == [3]
    assert oversampling.decide(ledger, "Clock").cuts == ()
    finished(ledger, 3)
    (decision,) = oversampling.decide(ledger, "Clock").cuts
    assert decision.groups == (0, 2)


def test_of_more_than_enough_the_first_are_kept_and_one_with_a_failed_sample_last() -> None:
    ledger = begun()
    ledger.give_up(0)
    finished(ledger, *range(1, 8))
    (decision,) = oversampling.decide(ledger, "Clock").cuts
    assert decision.groups == (0, 3)


def test_what_is_cut_off_is_leased_to_nobody_scored_by_nobody_and_not_waited_for() -> None:
    ledger = begun()
    lease = ledger.assign(0, "w")
    finished(ledger, 2, 3, 4, 6, 7)
    scoring = ledger.assign_scores(4, ["reward"], "scorer")
    (decision,) = oversampling.decide(ledger, "Clock").cuts
    ((index, released),) = ledger.cut(decision.groups)
    assert (index, released.worker, released.attempt) == (0, "w", lease)
    assert ledger.queued(8) == []
    assert ledger.all_generated
    assert [sample.index for sample in ledger.uncut_samples] == [2, 3, 6, 7]
    assert list(ledger.unscored()) == [2, 3, 6, 7]
    assert not ledger.finish(0, lease, "w", ONE, "stop", "")
    assert not ledger.score(4, scoring, "scorer", "reward", b"\0\0\0\0")
    assert not ledger.all_scored
    for uncut in (2, 3, 6, 7):
        ledger.score(uncut, ledger.assign_scores(uncut, ["reward"], "scorer"), "scorer", "reward", b"\0\0\0\0")
    assert ledger.all_scored
    ledger.train()
    assert ledger.counts()["trained"] == ledger.counts()["cut"] == 4


def test_a_batch_waits_for_the_cut_although_every_sample_is_scored() -> None:
    """Otherwise more samples would be trained on than the batch has."""
    ledger = begun()
    finished(ledger, *range(8))
    for index in range(8):
        ledger.score(index, ledger.assign_scores(index, ["reward"], "s"), "s", "reward", b"\0\0\0\0")
    assert not ledger.all_scored
    ledger.cut(oversampling.decide(ledger, "Clock").cuts[0].groups)
    assert ledger.all_scored


def test_a_replay_gives_the_ranks_the_same_batch_byte_for_byte(tmp_path: Path) -> None:
    job = make_job(tmp_path, batch=4, rollout={"batchSize": 4, "oversample": 2}, deterministic=False)
    context, prompts = job_context(job, schedule_json(job.spec)), make_prompts(job)
    assert most_samples(job.spec) == 6
    records = []
    for index in (0, 2, 3, 4, 5):
        key = pb.SampleKey(iteration=0, sample=index, attempt=1)
        array, log_p = packed("int32", bytes([index, 0, 0, 0])), packed("float32", bytes(4))
        spans = span_messages([VersionSpan(0, 1)])
        records.append(
            Record(finished=pb.FinishedSample(key=key, tokens=array, log_probabilities=log_p, versions=spans))
        )
    live = Ledger(0, 6, context.tasks, 1, spare=2)
    for record in records:
        apply_record(live, record)
    records.append(Record(cut=Cut(groups=oversampling.decide(live, "Clock").cuts[0].groups)))
    apply_record(live, records[-1])
    for index in (0, 2, 3, 4):
        for task in context.tasks:
            score = packed("float32", bytes([index, 0, 0, 0]))
            key = pb.SampleKey(iteration=0, sample=index, attempt=2)
            records.append(Record(scored=pb.ScoredSample(key=key, task=task.name, result=score)))
            apply_record(live, records[-1])
    again = replayed(0, 6, context.tasks, records, prompts, spare=2)
    (part,) = batch_parts(live, prompts)
    assert [(sample.sample, unpacked(sample.response, "int32")[0]) for sample in part.samples] == [
        (0, 0), (1, 2), (2, 3), (3, 4)
    ]  # fmt: skip
    assert part.total == 4
    assert [part.SerializeToString()] == [other.SerializeToString() for other in batch_parts(again, prompts)]


def test_a_job_that_oversamples_nothing_cuts_off_nothing() -> None:
    ledger = begun(spare=0)
    finished(ledger, *range(8))
    assert oversampling.decide(ledger, "Clock").cuts == ()
    assert ledger.count(SampleState.CUT) == 0
