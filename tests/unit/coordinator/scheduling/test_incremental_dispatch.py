"""Assignment of prefixes to workers, from constructed states."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.coordinator.coordinated import make_job
from tests.support.coordinator.job_states import NOW, decided, ready_state

from rlhf_api.score_blocks import BLOCK
from rlhf_common.names import Group
from rlhf_common.samples import VersionSpan
from rlhf_coordinator.scheduling import decisions as d
from rlhf_coordinator.scheduling.training_schedule import schedule_json
from rlhf_coordinator.state.incremental_state import HeldPrefix
from rlhf_coordinator.state.job_state import JobContext, JobState, job_context
from rlhf_coordinator.state.sample import PackedResponse

PROMPT = 2


def planned(folder: Path, incremental: str = "Enabled", workers: int = 2, **inference: Any) -> JobContext:
    settings = {"replicas": workers, "incremental": incremental, **inference}
    job = make_job(folder, batch=16, generation={"replicas": 2, "maxBatchSize": 16}, inference=settings)
    return job_context(job, schedule_json(job.spec))


def decoding(context: JobContext, *tokens: int) -> JobState:
    """Samples 0.. of the second iteration have these numbers of tokens and are decoded on generation-0."""
    state = ready_state(context, at=1)
    state.prompt_tokens = [PROMPT] * 16
    for index, count in enumerate(tokens):
        state.ledger.progress(index, state.ledger.assign(index, "generation-0"), "generation-0", 0, part(count))
    return state


def part(count: int) -> PackedResponse:
    return PackedResponse(b"\1\0\0\0" * count, b"\0\0\0\0" * count, (VersionSpan(1, count),) if count else ())


def finish(state: JobState, index: int, count: int) -> None:
    lease = state.ledger.samples[index].decoding
    assert lease is not None
    state.ledger.finish(index, lease.attempt, lease.worker, part(count), "stop", "")


def asked(context: JobContext, state: JobState) -> dict[str, tuple[int, ...]]:
    decisions = decided(context, state, NOW)
    return {item.worker: item.samples for item in decisions if isinstance(item, d.ScorePrefix)}


def scored(context: JobContext, state: JobState) -> dict[str, list[int]]:
    decisions = [item for item in decided(context, state, NOW) if isinstance(item, d.Score)]
    return {item.worker: [index for index, _ in item.samples] for item in decisions}


def test_idle_workers_are_given_the_longest_first_and_only_whole_blocks(tmp_path: Path) -> None:
    context = planned(tmp_path)
    assert PROMPT + 62 == BLOCK
    state = decoding(context, 62, 63, 300, 130)
    assert asked(context, state) == {"inference-0": (2, 1), "inference-1": (3,)}


@pytest.mark.parametrize("setting", [{"incremental": "Disabled"}, {"incremental": "Auto"}, {"overlap": "Disabled"}])
def test_nothing_is_sent_where_it_is_off(tmp_path: Path, setting: dict[str, Any]) -> None:
    context = planned(tmp_path, **setting)
    state = decoding(context, 300, 300)
    assert asked(context, state) == {}
    state.incremental.chosen = True
    assert bool(asked(context, state)) == ("Auto" in setting.values()), "Auto does what simulation said"


def test_a_finished_sample_comes_first(tmp_path: Path) -> None:
    context = planned(tmp_path)
    state = decoding(context, 300, 300, 300)
    finish(state, 2, 301)
    assert asked(context, state) == {}, "a finished sample waits"
    assert list(scored(context, state)) == ["inference-0"]
    state.ledger.assign_scores(2, ["reference", "values", "reward"], "inference-0")
    assert asked(context, state) == {"inference-1": (0, 1)}, "inference-0 has something to score"
    attempt = state.ledger.samples[2].attempt
    for task in ("reference", "values"):
        state.ledger.score(2, attempt, "inference-0", task, b"")
    assert set(asked(context, state)) == {"inference-0", "inference-1"}, "a reward that is called keeps no device busy"


def test_a_sample_stays_with_its_worker_until_that_is_gone_and_is_scored_there(tmp_path: Path) -> None:
    context = planned(tmp_path)
    state = decoding(context, 300, 300)
    state.incremental.prefixes = {0: HeldPrefix("inference-1", 256), 1: HeldPrefix("inference-1", 192)}
    assert asked(context, state) == {"inference-1": (1,)}, "no new block of 0, and 1 goes on where it was begun"
    state.incremental.asked[1] = HeldPrefix("inference-1", 256)
    assert asked(context, state) == {}
    finish(state, 0, 300)
    assert scored(context, state) == {"inference-1": [0]}
    for index in range(2, 9):
        state.ledger.finish(index, state.ledger.assign(index, "generation-0"), "generation-0", part(3), "stop", "")
        state.ledger.assign_scores(index, ["reference", "values", "reward"], "inference-1")
    assert scored(context, state) == {"inference-0": [0]}, "too much waits there"


def test_a_worker_without_room_is_given_no_new_sample_until_one_of_its_own_is_done(tmp_path: Path) -> None:
    context = planned(tmp_path, workers=1)
    state = decoding(context, 300, 300, 300)
    state.incremental.prefixes = {0: HeldPrefix("inference-0", 128)}
    state.incremental.full = {"inference-0": 1}
    assert asked(context, state) == {"inference-0": (0,)}
    state.incremental.full = {"inference-0": 2}
    assert asked(context, state) == {"inference-0": (1, 0)}


def test_so_many_are_asked_for_at_a_time(tmp_path: Path) -> None:
    context = planned(tmp_path, workers=1)
    state = decoding(context, *range(100, 116))
    first = asked(context, state)["inference-0"]
    assert len(first) == 8
    state.incremental.asked = {index: HeldPrefix("inference-0", BLOCK) for index in first[:6]}
    assert len(asked(context, state)["inference-0"]) == 2


def test_workers_that_decode_are_asked_for_nothing(tmp_path: Path) -> None:
    fusion = {"intraStage": {"mode": "Disabled"}, "interStage": {"mode": "Disabled"}}
    job = make_job(tmp_path, batch=16, fusion=fusion, inference={"replicas": 0, "incremental": "Enabled"})
    context = job_context(job, schedule_json(job.spec))
    state = decoding(context, 300, 300)
    for worker in state.fleet.in_group(Group.GENERATION):
        worker.roles, worker.versions = frozenset({"generation", "inference"}), {"actor": 1, "critic": 1}
    assert asked(context, state) == {}
