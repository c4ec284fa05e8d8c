"""Which prefixes go where, from worlds put together by hand."""

from pathlib import Path
from typing import Any

import pytest
from tests.coordinated import make_job
from tests.unit.coordinator.deciding.test_iteration import NOW, world_of

from rlhf_api.incremental import BLOCK
from rlhf_api.names import Group
from rlhf_operator.coordinator.deciding import decisions as d
from rlhf_operator.coordinator.deciding import iteration
from rlhf_operator.coordinator.deciding.schedule import schedule_json
from rlhf_operator.coordinator.world.prefix_state import Held
from rlhf_operator.coordinator.world.sample import Response
from rlhf_operator.coordinator.world.world import Plan, World, plan_of

PROMPT = 2


def planned(folder: Path, incremental: str = "On", workers: int = 2, **inference: Any) -> Plan:
    settings = {"replicas": workers, "incremental": incremental, **inference}
    job = make_job(folder, batch=16, generation={"replicas": 2, "maxBatchSize": 16}, inference=settings)
    return plan_of(job, schedule_json(job.spec))


def decoding(plan: Plan, *tokens: int) -> World:
    """Samples 0.. of the second iteration have so many tokens and are decoded on generation-0."""
    world = world_of(plan, at=1)
    world.prompt_tokens = [PROMPT] * 16
    for index, count in enumerate(tokens):
        world.ledger.progress(index, world.ledger.assign(index, "generation-0"), "generation-0", 0, part(count))
    return world


def part(count: int) -> Response:
    return Response(b"\1\0\0\0" * count, b"\0\0\0\0" * count, ((1, count),) if count else ())


def finish(world: World, index: int, count: int) -> None:
    handout = world.ledger.samples[index].decoding
    assert handout is not None
    world.ledger.finish(index, handout.epoch, handout.worker, part(count), "stop", "")


def asked(plan: Plan, world: World) -> dict[str, tuple[int, ...]]:
    decisions = iteration.decide(plan, world, NOW)
    return {item.worker: item.samples for item in decisions if isinstance(item, d.ScorePrefix)}


def scored(plan: Plan, world: World) -> dict[str, list[int]]:
    decisions = [item for item in iteration.decide(plan, world, NOW) if isinstance(item, d.Score)]
    return {item.worker: [index for index, _ in item.samples] for item in decisions}


def test_idle_workers_are_given_the_longest_first_and_only_whole_blocks(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert PROMPT + 62 == BLOCK
    world = decoding(plan, 62, 63, 300, 130)
    assert asked(plan, world) == {"inference-0": (2, 1), "inference-1": (3,)}


@pytest.mark.parametrize("setting", [{"incremental": "Off"}, {"incremental": "Auto"}, {"overlap": "Off"}])
def test_nothing_is_sent_where_it_is_off(tmp_path: Path, setting: dict[str, str]) -> None:
    plan = planned(tmp_path, **setting)
    world = decoding(plan, 300, 300)
    assert asked(plan, world) == {}
    world.prefixes.chosen = True
    assert bool(asked(plan, world)) == ("Auto" in setting.values()), "Auto does what simulation said"


def test_a_finished_sample_comes_first(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    world = decoding(plan, 300, 300, 300)
    finish(world, 2, 301)
    assert asked(plan, world) == {}, "a finished sample waits"
    assert list(scored(plan, world)) == ["inference-0"]
    world.ledger.assign_scores(2, ["reference", "values", "reward"], "inference-0")
    assert asked(plan, world) == {"inference-1": (0, 1)}, "inference-0 has something to score"
    epoch = world.ledger.samples[2].epoch
    for task in ("reference", "values"):
        world.ledger.score(2, epoch, "inference-0", task, b"")
    assert set(asked(plan, world)) == {"inference-0", "inference-1"}, "a reward that is called keeps no device busy"


def test_a_sample_stays_with_its_worker_until_that_is_gone_and_is_scored_there(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    world = decoding(plan, 300, 300)
    world.prefixes.held = {0: Held("inference-1", 256), 1: Held("inference-1", 192)}
    assert asked(plan, world) == {"inference-1": (1,)}, "no new block of 0, and 1 goes on where it was begun"
    world.prefixes.asked[1] = Held("inference-1", 256)
    assert asked(plan, world) == {}
    finish(world, 0, 300)
    assert scored(plan, world) == {"inference-1": [0]}
    for index in range(2, 9):
        world.ledger.finish(index, world.ledger.assign(index, "generation-0"), "generation-0", part(3), "stop", "")
        world.ledger.assign_scores(index, ["reference", "values", "reward"], "inference-1")
    assert scored(plan, world) == {"inference-0": [0]}, "too much waits there"


def test_a_worker_without_room_is_given_no_new_sample_until_one_of_its_own_is_done(tmp_path: Path) -> None:
    plan = planned(tmp_path, workers=1)
    world = decoding(plan, 300, 300, 300)
    world.prefixes.held = {0: Held("inference-0", 128)}
    world.prefixes.full = {"inference-0": 1}
    assert asked(plan, world) == {"inference-0": (0,)}
    world.prefixes.full = {"inference-0": 2}
    assert asked(plan, world) == {"inference-0": (1, 0)}


def test_so_many_are_asked_for_at_a_time(tmp_path: Path) -> None:
    plan = planned(tmp_path, workers=1)
    world = decoding(plan, *range(100, 116))
    first = asked(plan, world)["inference-0"]
    assert len(first) == 8
    world.prefixes.asked = {index: Held("inference-0", BLOCK) for index in first[:6]}
    assert len(asked(plan, world)["inference-0"]) == 2


def test_workers_that_decode_are_asked_for_nothing(tmp_path: Path) -> None:
    fusion = {"intraStage": {"mode": "Off"}, "interStage": {"mode": "Off"}}
    job = make_job(tmp_path, batch=16, fusion=fusion, inference={"replicas": 0, "incremental": "On"})
    plan = plan_of(job, schedule_json(job.spec))
    world = decoding(plan, 300, 300)
    for worker in world.fleet.of(Group.GENERATION):
        worker.role, worker.versions = "generation+inference", {"actor": 1, "critic": 1}
    assert asked(plan, world) == {}
