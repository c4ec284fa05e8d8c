"""Several rewards in the ledger: each is leased and abstains separately, and the last one completes the number."""

import struct
from typing import Any

import pytest
import yaml
from tests.support.manifests.manifest_cases import changed

from rlhf_api.algorithms import Task, graph_of
from rlhf_api.manifest import parse
from rlhf_common.names import Group
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.sample import PackedResponse, SampleState

REWARDS = [
    {"name": "correct", "weight": 2, "function": {"file": "correct.py"}},
    {"name": "short", "weight": -0.5, "function": {"file": "short.py"}},
]


def tasks_of(**shaping: Any) -> tuple[Task, ...]:
    """Return the scoring tasks of a job with two rewards."""
    changes = {"spec.models.rewards": REWARDS, "spec.rewardShaping": shaping}
    job = parse(yaml.safe_dump(yaml.safe_load(changed("grpo", changes, ["spec.models.reward"]))))
    return graph_of(job.spec).tasks_of(Group.INFERENCE)


def scored(tasks: tuple[Task, ...], rewards: dict[str, float | None], order: int = 1) -> tuple[Ledger, list[bool]]:
    """Return a ledger whose single sample has its rewards, recorded one by one, and whether it was scored after
    each."""
    ledger = Ledger(0, 1, tasks, 1)
    attempt = ledger.assign(0, "g")
    ledger.finish(0, attempt, "g", PackedResponse(struct.pack("<i", 1), struct.pack("<f", -1)), "stop", "text")
    done = []
    for task in tasks[::order]:
        lease = ledger.assign_scores(0, [task.name], "i")
        value = 0.0 if task.part is None else rewards[task.part.name]
        assert ledger.score(0, lease, "i", task.name, None if value is None else struct.pack("<f", value))
        done.append(ledger.samples[0].state is SampleState.SCORED)
    return ledger, done


def number(packed: bytes) -> float:
    return float(struct.unpack("<f", packed)[0])


def test_each_reward_is_a_task_of_its_own_and_training_needs_what_they_become() -> None:
    tasks = tasks_of()
    assert [task.name for task in tasks if task.rewards] == ["reward/correct", "reward/short"]
    job = parse(changed("grpo", {"spec.models.rewards": REWARDS}, ["spec.models.reward"]))
    assert [str(field) for field in graph_of(job.spec).reward_fields] == ["reward"]
    assert "reward/correct" not in graph_of(job.spec).scored_fields


@pytest.mark.parametrize("order", [1, -1])
def test_the_last_reward_completes_the_sample_whichever_it_is(order: int) -> None:
    ledger, done = scored(tasks_of(), {"correct": 1.0, "short": 4.0}, order)
    assert done == [False] * (len(done) - 1) + [True]
    fields = ledger.samples[0].fields
    assert [number(fields[name]) for name in ("reward", "reward/correct", "reward/short")] == [0.0, 1.0, 4.0]


def test_a_reward_that_abstains_is_left_out_and_a_sample_abstains_when_all_do() -> None:
    ledger, _ = scored(tasks_of(), {"correct": None, "short": 4.0})
    assert number(ledger.samples[0].fields["reward"]) == -2.0
    assert not ledger.samples[0].abstained
    ledger, done = scored(tasks_of(), {"correct": None, "short": None})
    assert done[-1]
    assert ledger.samples[0].abstained
    assert "reward" not in ledger.samples[0].fields


def test_the_manifest_says_how_they_are_combined() -> None:
    ledger, _ = scored(tasks_of(combine="Min"), {"correct": 3.0, "short": 4.0})
    assert number(ledger.samples[0].fields["reward"]) == -2.0


def test_what_was_written_down_gives_the_same_number() -> None:
    tasks = tasks_of()
    first, _ = scored(tasks, {"correct": 0.1, "short": 0.7})
    again = Ledger(0, 1, tasks, 2)
    again.restore_response(0, first.samples[0].response, "stop", "text")
    for task in tasks[::-1]:
        again.restore_score(0, task.name, first.samples[0].fields[task.produces[0]])
    assert again.samples[0].fields == first.samples[0].fields
