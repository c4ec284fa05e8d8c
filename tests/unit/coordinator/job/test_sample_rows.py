"""Rows of sample tables come from the ledger, and are the same after a coordinator recovers from its journal."""

import struct
from dataclasses import asdict
from pathlib import Path

import numpy as np
import yaml
from tests.support.coordinator.coordinated import make_job
from tests.support.coordinator.in_process_coordinator import begin_in_process
from tests.support.manifests.manifest_cases import changed

from rlhf_api.algorithms import graph_of
from rlhf_api.manifest import parse
from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack
from rlhf_coordinator.job.sample_rows import numbers_by_sample, rewards_by_name, sample_row
from rlhf_coordinator.reports.sample_table import SampleRow
from rlhf_coordinator.state.sample import Origin, Sample
from rlhf_coordinator.storage.journal_pb2 import Begun, Record, Trained

ADVANTAGES = pack(np.array([0.5, np.nan, -2.0, 0.0], dtype=np.float32))

SHAPED = pack(np.array([-1.0, np.nan, 1.5, 2.0], dtype=np.float32))


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
    """Return the rows of a coordinator that recovers from the journal in this folder."""
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
    result = pb.TrainResult(iteration=0, version=1, advantages=ADVANTAGES, shaped_rewards=SHAPED)
    run.journal.append(Record(trained=Trained(result=result)))
    run.journal.close()

    rows = rows_of(tmp_path)
    assert [row.advantage for row in rows] == [0.5, None, -2.0, 0.0], "no number is no zero"
    assert [row.reward for row in rows] == [0.0, None, 2.0, 3.0], "before shaping"
    assert [row.shaped_reward for row in rows] == [-1.0, None, 1.5, 2.0]
    assert [row.migrated for row in rows] == [False, True, False, True]
    assert rows[1].abstained
    first = asdict(rows[0])
    assert first["response"] == "answer 0"
    assert (first["workers"], first["weight_versions"]) == (("generation-0",), ((0, 2),))
    assert (first["drafted_tokens"], first["accepted_tokens"], first["finish_reason"]) == (6, 2, "length")
    assert rows_of(tmp_path) == rows


def test_a_rank_that_says_nothing_of_advantages_leaves_them_out() -> None:
    assert numbers_by_sample(None) == []
    assert numbers_by_sample(pb.Array()) == []


def test_a_row_has_every_reward_by_its_name(tmp_path: Path) -> None:
    """Additional values of each reward are under its name if there are several rewards."""
    rewards = [{"name": name, "weight": 2, "function": {"file": f"{name}.py"}} for name in ("correct", "short")]
    content = yaml.safe_load(changed("grpo", {"spec.models.rewards": rewards}, ["spec.models.reward"]))
    job = parse(yaml.safe_dump(content))
    sample = Sample(0, Origin(0, 0))
    for name, value in (("reward", 3.0), ("reward/correct", 1.0), ("reward/short", 0.5)):
        sample.fields[name] = struct.pack("<f", value)
    for name, value in (("correct", 0.25), ("short", 0.75)):
        sample.reward_metrics[f"reward/{name}"] = {"length": value}
    assert rewards_by_name(sample, graph_of(job.spec)) == {
        "reward": 3.0,
        "correct": 1.0,
        "short": 0.5,
        "correct/length": 0.25,
        "short/length": 0.75,
    }
