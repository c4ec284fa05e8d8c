"""Which workers keep the tail and which score, from constructed states."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.coordinator.coordinated import make_job
from tests.support.coordinator.job_states import NOW, decided, finish_all, kinds, ready_state

from rlhf_common import control_pb2 as pb
from rlhf_common.names import Group
from rlhf_common.samples import VersionSpan
from rlhf_coordinator.scheduling import decisions as d
from rlhf_coordinator.scheduling import iteration, waits
from rlhf_coordinator.scheduling.training_schedule import schedule_json
from rlhf_coordinator.state.job_state import JobContext, JobState, job_context
from rlhf_coordinator.state.sample import PackedResponse
from rlhf_coordinator.state.worker import CommandKind, PendingCommand
from rlhf_planner.inter_stage.choose import FusionChoice
from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.fitted_costs import StepTime
from rlhf_planner.inter_stage.throughput import EVEN_PACE

BOTH = frozenset({"generation", "inference"})


def fusion_context(
    folder: Path, mode: str = "Fixed", workers: int = 3, inference: int = 0, **settings: Any
) -> JobContext:
    inter_stage = {"mode": mode, **({"threshold": 4, "pool": 1} if mode == "Fixed" else {}), **settings}
    fusion = {"intraStage": {"mode": "Disabled"}, "interStage": inter_stage}
    generation = {"replicas": workers, "maxBatchSize": 6}
    job = make_job(folder, batch=8, fusion=fusion, generation=generation, inference={"replicas": inference})
    return job_context(job, schedule_json(job.spec))


def scoring_fleet(context: JobContext, threshold: int = 4, pool: int = 1) -> JobState:
    """All generation workers have the scoring models too, with stale critics; a tail of four consolidates on one."""
    state = ready_state(context, at=1)
    for worker in state.fleet.in_group(Group.GENERATION):
        worker.roles, worker.versions, worker.scorer_onloaded = BOTH, {"actor": 1, "critic": 0}, False
    transfer = context.spec.fusion.inter_stage.transfer
    if threshold:
        state.fusion.choice = FusionChoice(threshold, pool, transfer, 0.0, 0.0, (), "as set")
    return state


def part(count: int) -> PackedResponse:
    return PackedResponse(b"\1\0\0\0" * count, b"\0\0\0\0" * count, (VersionSpan(1, count),) if count else ())


def finish(state: JobState, index: int, worker: str) -> None:
    state.ledger.finish(index, state.ledger.assign(index, worker), worker, part(3), "stop", "")


def hold(state: JobState, index: int, worker: str, tokens: int = 2) -> None:
    state.ledger.progress(index, state.ledger.assign(index, worker), worker, 0, part(tokens))


@pytest.fixture
def consolidating(tmp_path: Path) -> tuple[JobContext, JobState]:
    """Four samples are left, on two workers; the third is idle."""
    context = fusion_context(tmp_path, transfer="KV")
    state = scoring_fleet(context)
    for index in range(4):
        finish(state, index, "generation-2")
    for index, worker in ((4, "generation-0"), (5, "generation-1"), (6, "generation-1"), (7, "generation-1")):
        hold(state, index, worker)
    return context, state


def test_a_generation_worker_becomes_inference_too_and_only_where_it_may_score(tmp_path: Path) -> None:
    def becoming(context: JobContext) -> list[str]:
        decisions = decided(context, ready_state(context, at=1), NOW)
        return [item.worker for item in decisions if isinstance(item, d.PrepareWorker)]

    everybody = [f"generation-{index}" for index in range(3)]
    assert becoming(fusion_context(tmp_path)) == everybody
    assert becoming(fusion_context(tmp_path, mode="Disabled")) == everybody, "nobody else scores"
    assert becoming(fusion_context(tmp_path, mode="Disabled", inference=2)) == []
    assert becoming(fusion_context(tmp_path, mode="Auto", inference=2)) == everybody
    assert becoming(fusion_context(tmp_path, mode="Auto", inference=2, workers=1)) == [], "nobody to leave a tail to"


def test_the_tail_moves_to_the_worker_with_most_of_it_and_the_others_score(
    consolidating: tuple[JobContext, JobState],
) -> None:
    context, state = consolidating
    decisions = decided(context, state, NOW)
    assert d.Migrate("generation-0", "generation-1", (4,)) in decisions
    loads = [item for item in decisions if isinstance(item, d.PrepareWorker)]
    assert [(item.worker, item.model, item.version) for item in loads] == [("generation-2", "critic", 1)]
    assert "Score" not in kinds(decisions), "not before its critic is current"
    state.fleet.workers["generation-2"].versions["critic"] = 1
    source, arriving = state.ledger.migrate(4, "generation-1")
    scoring = {item.worker for item in decided(context, state, NOW) if isinstance(item, d.Score)}
    assert scoring == {"generation-2"}
    assert "Migrate" not in kinds(decided(context, state, NOW)), "it is on its way"
    assert state.ledger.moved(4, source, arriving, part(2))
    tail = iteration.decide(context, state, NOW).consolidation
    assert (tail.pool, tail.released) == (("generation-1",), ("generation-0", "generation-2"))


def test_a_sample_that_cannot_be_moved_with_its_cache_goes_by_its_tokens(
    consolidating: tuple[JobContext, JobState],
) -> None:
    context, state = consolidating
    source, _ = state.ledger.migrate(4, "generation-1")
    state.ledger.stayed(4, source)
    assert d.Withdraw("generation-0", (4,)) in decided(context, state, NOW)
    index, attempt = 4, state.ledger.withdraw(4)[1]
    state.ledger.withdrawn(index, attempt, "generation-0", part(2))
    decisions = decided(context, state, NOW)
    assert [item for item in decisions if isinstance(item, d.Generate)] == [d.Generate("generation-1", (4,))]


def test_when_the_pool_is_lost_another_takes_the_tail(consolidating: tuple[JobContext, JobState]) -> None:
    context, state = consolidating
    for name in ("generation-0", "generation-1"):
        state.ledger.reclaim(name)
    lost = state.fleet.workers["generation-1"]
    state.fleet.closed("generation-1", lost.session, NOW)
    state.fleet.expire(NOW + 3)
    (generate,) = [item for item in decided(context, state, NOW + 3) if isinstance(item, d.Generate)]
    assert len(generate.samples) == 4
    assert generate.worker in ("generation-0", "generation-2")


def test_without_fusion_generation_workers_score_when_all_is_generated_and_nobody_else_does(tmp_path: Path) -> None:
    for inference, expected in ((0, {"generation-0", "generation-1", "generation-2"}), (1, {"inference-0"})):
        context = fusion_context(tmp_path, mode="Disabled", inference=inference)
        state = scoring_fleet(context, threshold=0)
        for worker in state.fleet.in_group(Group.GENERATION):
            worker.versions["critic"] = 1
        finish(state, 0, "generation-0")
        early = {item.worker for item in decided(context, state, NOW) if isinstance(item, d.Score)}
        assert early == expected & {"inference-0"}
        for index in range(1, 8):
            finish(state, index, "generation-0")
        late = {item.worker for item in decided(context, state, NOW) if isinstance(item, d.Score)}
        assert late == expected


def test_what_takes_longest_to_score_is_leased_first(tmp_path: Path) -> None:
    context = fusion_context(tmp_path, inference=1)
    state = scoring_fleet(context, threshold=0)
    for index, tokens in enumerate((3, 5, 2, 9, 4)):
        attempt = state.ledger.assign(index, "generation-0")
        state.ledger.finish(index, attempt, "generation-0", part(tokens), "stop", "")
    scores = [item for item in decided(context, state, NOW) if isinstance(item, d.Score)]
    assert [index for item in scores for index, tasks in item.samples if "values" in tasks] == [3, 1, 4, 0]


def test_rewards_by_calls_fly_together_and_models_leave_work_for_those_who_come_late(tmp_path: Path) -> None:
    context = fusion_context(tmp_path, inference=1)
    state = scoring_fleet(context, threshold=0)
    for index in range(7):
        finish(state, index, "generation-0")
    scores = [item for item in decided(context, state, NOW) if isinstance(item, d.Score)]
    assert {item.worker for item in scores} == {"inference-0"}
    tasks = [task for item in scores for _, names in item.samples for task in names]
    assert (tasks.count("reward"), tasks.count("values"), tasks.count("reference")) == (7, 4, 4)


def test_a_threshold_that_the_pool_has_no_room_for_waits(tmp_path: Path) -> None:
    context = fusion_context(tmp_path)
    state = scoring_fleet(context, threshold=8)
    assert not iteration.decide(context, state, NOW).consolidation.begun, "8 samples, and room for 6"
    finish(state, 0, "generation-0")
    finish(state, 1, "generation-0")
    assert iteration.decide(context, state, NOW).consolidation.begun
    state.fusion.choice = FusionChoice(8, 3, "KV", 0.0, 0.0, (), "")
    assert not iteration.decide(context, state, NOW).consolidation.begun, "a pool of all workers consolidates nothing"


def test_costs_are_measured_before_anything_is_decoded(tmp_path: Path) -> None:
    context = fusion_context(tmp_path, mode="Auto", inference=1)
    state = scoring_fleet(context, threshold=0)
    asked = [item for item in decided(context, state, NOW) if isinstance(item, d.MeasureCosts)]
    assert [(item.worker, item.role) for item in asked] == [(f"generation-{n}", "generation") for n in range(3)]
    assert "Generate" not in kinds(decided(context, state, NOW))
    state.fusion.given_up = "no room"
    assert "Generate" in kinds(decided(context, state, NOW))
    state.fusion.given_up, state.fusion.measured = "", True
    assert "Generate" in kinds(decided(context, state, NOW))


def test_costs_are_taken_when_nobody_measures_any_more_and_who_still_starts_is_not_waited_for(tmp_path: Path) -> None:
    context = fusion_context(tmp_path, mode="Auto", inference=1)
    state = scoring_fleet(context, threshold=0)
    state.fleet.workers["generation-2"].roles = frozenset()
    for index in range(2):
        for role in ("generation", "inference"):
            state.fusion.results[f"generation-{index}", role] = pb.MeasureResult()
    busy = state.fleet.workers["generation-1"]
    busy.pending[5] = PendingCommand(CommandKind.MEASURE, NOW, "measure what inference costs")
    assert "AdoptCosts" not in kinds(decided(context, state, NOW))
    busy.pending.clear()
    assert d.AdoptCosts() in decided(context, state, NOW)


def test_a_worker_that_would_run_dry_takes_from_the_fullest_and_then_rests(tmp_path: Path) -> None:
    context = fusion_context(tmp_path, mode="Auto", inference=1, transfer="KV")
    state = scoring_fleet(context, threshold=0)
    steps = [StepTime(1, 16, 0.01), StepTime(6, 16, 0.05)]
    state.fusion.costs = StageCosts.measured(
        decode=steps, max_batch_size=6, bandwidth=1e9, kv_bytes_per_token=10, replays=True
    )
    state.fusion.measured = True
    for index in range(2, 8):
        hold(state, index, "generation-0")
    for index in range(2):
        hold(state, index, f"generation-{index + 1}", tokens=40)
    moves = [item for item in decided(context, state, NOW) if isinstance(item, d.Migrate)]
    assert moves
    assert {item.source for item in moves} == {"generation-0"}
    state.fusion.moved_at = dict.fromkeys(("generation-0", "generation-1", "generation-2"), NOW)
    assert "Migrate" not in kinds(decided(context, state, NOW + 1))
    assert "Migrate" in kinds(decided(context, state, NOW + 3))
    state.fusion.measured = False
    state.fusion.given_up = "no room"
    assert "Migrate" not in kinds(decided(context, state, NOW + 3))


def test_a_slow_worker_gives_to_one_that_holds_as_many_and_does_not_get_it_back(tmp_path: Path) -> None:
    context = fusion_context(tmp_path, mode="Auto", workers=2, inference=1, transfer="Tokens")
    state = scoring_fleet(context, threshold=0)
    steps = [StepTime(1, 16, 0.01), StepTime(6, 16, 0.05)]
    state.fusion.costs, state.fusion.measured = StageCosts.measured(decode=steps, max_batch_size=6), True
    for index in range(8):
        hold(state, index, f"generation-{index % 2}")
    assert decided(context, state, NOW) == [], "as many samples, and as far as is known as fast"
    for _ in range(60):
        state.fusion.paces["generation-1"] = state.fusion.paces.get("generation-1", EVEN_PACE).observed(4, 4.0)
    noted, withdrawn = decided(context, state, NOW)
    assert isinstance(noted, d.NoteReallocation)
    assert isinstance(withdrawn, d.Withdraw)
    assert withdrawn.worker == "generation-1"
    for index in withdrawn.samples:
        attempt, worker = state.ledger.withdraw(index)[1], "generation-1"
        state.ledger.withdrawn(index, attempt, worker, part(2))
        state.fusion.destinations[index] = "generation-0"
    (leased,) = [item for item in decided(context, state, NOW) if isinstance(item, d.Generate)]
    assert leased == d.Generate("generation-0", withdrawn.samples), "not to the least loaded one, where it came from"


def test_publishing_waits_for_the_policy_alone(tmp_path: Path) -> None:
    context = fusion_context(tmp_path)
    state = scoring_fleet(context)
    finish_all(state)
    state.ledger.train()
    state.trained = True
    for worker in state.fleet:
        worker.versions |= dict.fromkeys(worker.versions.keys() - {"critic"}, 2)
        worker.trained_version = 2
    assert iteration.decide(context, state, NOW).phase == "Checkpointing", (
        "critics of generation workers are loaded when released"
    )


def test_a_migration_that_hangs_is_waited_for_by_both_names(consolidating: tuple[JobContext, JobState]) -> None:
    context, state = consolidating
    state.fleet.workers["generation-0"].pending[7] = PendingCommand(
        CommandKind.MIGRATE, NOW, "move 1 samples to generation-1"
    )
    assert "generation-0 to move 1 samples to generation-1 (5 s)" in waits.descriptions(context, state, NOW + 5)
    limit = context.spec.run_policy.start_timeout_seconds
    (leave,) = [item for item in decided(context, state, NOW + limit + 1) if isinstance(item, d.ExitWorker)][:1]
    assert leave.worker == "generation-0"
