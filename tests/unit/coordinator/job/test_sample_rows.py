"""Rows of sample tables come from the ledger, and are the same when a coordinator comes back from its journal."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
from tests.support.coordinated import make_job
from tests.support.in_process_coordinator import begin_in_process

from rlhf_api import control_pb2 as pb
from rlhf_api.arrays import pack
from rlhf_coordinator.job.sample_rows import advantage_numbers, sample_row
from rlhf_coordinator.reports.sample_table import SampleRow
from rlhf_coordinator.storage.journal_pb2 import Begun, Record, Trained

ADVANTAGES = pack(np.array([0.5, np.nan, -2.0, 0.0], dtype=np.float32))


def finished(index: int) -> pb.FinishedSample:
    return pb.FinishedSample(
        key=pb.SampleKey(iteration=0, sample=index, attempt=70000),
        tokens=pack(np.array([7, index], dtype=np.int32)),
        log_probabilities=pack(np.zeros(2, dtype=np.float32)),
        versions=[pb.VersionSpan(version=0, tokens=2)],
        finish_reason="length",
        text=f"answer {index}",
        drafted_tokens=6,
        accepted_tokens=2,
    )


def rows_of(folder: Path) -> list[SampleRow]:
    """What a coordinator shows that finds the journal in this folder."""
    job = make_job(folder, batch=4, algorithm="grpo")
    run, _ = begin_in_process(folder, job)
    return [sample_row(run, index, index) for index in range(4)]


def test_a_restored_coordinator_shows_the_same_rows(tmp_path: Path) -> None:
    job = make_job(tmp_path, batch=4, algorithm="grpo")
    run, _ = begin_in_process(tmp_path, job)
    run.journal.begin(Begun(iteration=0, coordinator_epoch=1))
    for index in range(4):
        workers = ["generation-0", "generation-1"][: 1 + index % 2]
        run.journal.append(Record(finished=finished(index), decoded_by=workers))
        for task in run.context.tasks:
            numbers = task.produces[0].numbers(2)
            score = pb.ScoredSample(key=finished(index).key, task=task.name)
            if not (task.rewards and index == 1):
                score.result.CopyFrom(pack(np.full(numbers, index, dtype=np.float32)))
            else:
                score.abstained = True
            run.journal.append(Record(scored=score))
    result = pb.TrainResult(iteration=0, version=1, advantages=ADVANTAGES)
    run.journal.append(Record(trained=Trained(result=result)))
    run.journal.close()

    rows = rows_of(tmp_path)
    assert [row.advantage for row in rows] == [0.5, None, -2.0, 0.0], "no number is no zero"
    assert [row.reward for row in rows] == [0.0, None, 2.0, 3.0]
    assert [row.migrated for row in rows] == [False, True, False, True]
    assert rows[1].abstained
    first = asdict(rows[0])
    assert first["response"] == "answer 0"
    assert (first["workers"], first["weight_versions"]) == (("generation-0",), ((0, 2),))
    assert (first["drafted_tokens"], first["accepted_tokens"], first["finish_reason"]) == (6, 2, "length")
    assert rows_of(tmp_path) == rows


def test_a_rank_that_says_nothing_of_advantages_leaves_them_out() -> None:
    assert advantage_numbers(None) == []
    assert advantage_numbers(pb.Array()) == []
