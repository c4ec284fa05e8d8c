"""Findings from facts of real runs with an injected cause, and from facts constructed for one cause."""

import pytest
from tests.support.jobs.explained_runs import RUNS, recorded_facts

from rlhf_coordinator.reports.trackers.facts_jsonl import read_facts
from rlhf_planner.explain.causes import long_tail, scoring_overlap
from rlhf_planner.explain.decode_costs import decode_costs
from rlhf_planner.explain.finding import MAX_CHARACTERS
from rlhf_planner.explain.iteration_profile import DraftFacts, IterationProfile, SampleFacts, StepFacts, TaskFacts
from rlhf_planner.explain.ranking import comparable, explain
from rlhf_planner.explain.registry import CAUSES
from rlhf_planner.explain.replays import generation, scoring_end
from rlhf_planner.inter_stage.costs import SCORE_BATCH

INJECTED = {
    "slow-worker": "slow worker",
    "slow-reward": "slow reward",
    "overlap": "scoring waits for the whole batch",
    "few-generation-workers": "too few generation workers",
    "few-generation-workers-of-two": "too few generation workers",
    "small-batches": "small batches",
    "long-tail": "long tail",
    "useless-drafts": "useless drafts",
    "frequent-checkpoints": "checkpoints",
    "few-inference-workers": "too few inference workers",
    "slow-worker-of-three": "slow worker",
}
"""Recorded run -> its injected cause."""


@pytest.mark.parametrize("name", INJECTED)
def test_the_injected_cause_of_a_real_run_is_named_first_with_a_gain(name: str) -> None:
    findings = explain(read_facts(RUNS / f"{name}.jsonl"))
    assert findings[0].cause == INJECTED[name]
    gain = findings[0].gain
    assert gain is not None
    assert gain > 1.1
    assert len(findings[0].words) <= MAX_CHARACTERS


def test_an_iteration_without_a_loss_has_no_findings() -> None:
    assert explain([]) == []
    assert explain([recorded_facts()]) == []


def test_causes_have_names_of_their_own() -> None:
    assert len({cause.name for cause in CAUSES}) == len(CAUSES)


def test_the_first_iteration_and_other_settings_are_left_out_where_there_are_others() -> None:
    first, other, last = (
        recorded_facts(iteration=0),
        recorded_facts(iteration=1, pipeline=2),
        recorded_facts(iteration=2),
    )
    assert comparable([first]) == [first]
    assert comparable([first, other, last]) == [last]


def test_a_checkpoint_costs_what_it_took_spread_over_iterations() -> None:
    phases = {"Generating": 6.0, "Checkpointing": 4.0}
    facts = [
        recorded_facts(iteration=n, checkpoint_every=2, phases=phases if n % 2 else {"Generating": 6.0})
        for n in (1, 2, 3)
    ]
    (finding,) = explain(facts)
    assert (finding.cause, finding.field, finding.value) == ("checkpoints", "spec.checkpoints.every", "20")
    assert finding.seconds == pytest.approx(4 / 2 - 4 / 20)
    assert finding.gain == pytest.approx(10 / (10 - 1.8))


def test_what_an_evaluation_held_up_is_no_cost_of_the_checkpoint() -> None:
    phases = {"Generating": 6.0, "Checkpointing": 4.0}
    facts = recorded_facts(checkpoint_every=1, evaluation_every=1, phases=phases, evaluation_waited=4.0)
    (finding,) = explain([facts])
    assert (finding.cause, finding.field) == ("evaluations", "spec.evaluation.every")


def test_where_a_gain_is_not_known_no_number_is_given() -> None:
    (finding,) = explain([recorded_facts(phases={"Publishing": 5.0, "Training": 5.0})])
    assert (finding.cause, finding.gain, finding.seconds) == ("weight publishing", None, 5.0)
    assert "gain not known" in finding.words


def test_ranks_that_wait_for_each_other_are_bubbles() -> None:
    facts = recorded_facts(
        phases={"Training": 10.0}, pipeline=4, intra_stage="Disabled", training={"bubble_share": 0.4}
    )
    (finding,) = explain([facts])
    assert (finding.cause, finding.field, finding.value) == ("pipeline bubbles", "spec.fusion.intraStage.mode", "Auto")
    assert finding.seconds == pytest.approx(4.0)
    assert finding.gain is None


def test_waiting_for_training_ranks_that_died_is_recovery() -> None:
    (finding,) = explain([recorded_facts(phases={"Recovering": 7.0, "Training": 3.0}, returned=5)])
    assert finding.cause == "recovery after faults"
    assert "5 leases" in finding.words


def queued(seconds_per_row: float) -> SampleFacts:
    """Return forty responses, four at a time on each of two workers, in steps of 10 ms plus a cost per row."""
    costs = decode_costs(steps(seconds_per_row))
    assert costs is not None
    lengths = [60.0 + 7 * (place % 6) for place in range(40)]
    bare = SampleFacts(
        prompts=[8.0] * 40, responses=lengths, begun=[0.0] * 40, finished=[], scored=[], workers=[0, 1] * 20
    )
    finished = generation(bare, costs, 4, [1.0, 1.0])
    leased = [0.0] * 10 + sorted(finished)[:30]
    return bare.model_copy(update={"begun": leased, "finished": finished})


def steps(seconds_per_row: float, paces: tuple[float, ...] = (1.0, 1.0)) -> list[StepFacts]:
    """Return the observed steps of the workers of `queued`, at sizes that separate the cost of a step from that of a
    row."""
    return [
        StepFacts(
            worker=f"generation-{index}",
            steps=100,
            rows=rows,
            keys=50,
            tokens=1,
            verified=0,
            seconds=100 * pace * (0.010 + rows * seconds_per_row),
        )
        for index, pace in enumerate(paces)
        for rows in (1.0, 2.0, 4.0)
    ]


@pytest.mark.parametrize(
    ("seconds_per_row", "cause", "change"),
    [
        (0.0001, "small batches", ("spec.generation.maxBatchSize", "16")),
        (0.05, "too few generation workers", ("spec.generation.replicas", "4")),
    ],
)
def test_samples_that_wait_for_a_row_need_rows_where_these_are_cheap_and_workers_where_not(
    seconds_per_row: float, cause: str, change: tuple[str, str]
) -> None:
    samples = queued(seconds_per_row)
    generated = max(samples.finished)
    facts = recorded_facts(
        total=generated,
        phases={"Generating": generated},
        max_batch_size=4,
        samples=samples,
        steps=steps(seconds_per_row),
    )
    finding = explain([facts])[0]
    assert (finding.cause, finding.field, finding.value) == (cause, *change)
    assert finding.gain is not None
    assert 1.6 < finding.gain < 5


def test_a_replay_that_does_not_meet_what_was_measured_gives_no_number() -> None:
    end = max(queued(0.001).finished)
    ends = [end if place % 2 else 0.5 * end for place in range(40)]
    samples = queued(0.001).model_copy(update={"finished": ends, "begun": [0.0] * 40})
    phases = {"Generating": end}
    facts = recorded_facts(total=end, phases=phases, samples=samples, steps=steps(0.1, (1.0, 3.0)), max_batch_size=40)
    finding = explain([facts])[0]
    assert finding.cause == "slow worker"
    assert finding.gain is None


def drafted_iteration(seconds: list[float]) -> IterationProfile:
    """Return an iteration with drafts that are never right. `seconds`: those of a step at 1, 2, 4 and 8 rows."""
    rows = [
        StepFacts(
            worker="generation-0", steps=10, rows=count, keys=50, tokens=1, verified=10, seconds=10 * seconds[place]
        )
        for place, count in enumerate((1.0, 2.0, 4.0, 8.0))
    ]
    taken = sum(row.seconds for row in rows)
    drafts = DraftFacts(
        steps=40,
        drafted_steps=40,
        samples=150,
        tokens=150,
        drafted=600,
        accepted=0,
        draft_seconds=0.1 * taken,
        seconds=taken,
    )
    phases = {"Generating": taken}
    return recorded_facts(total=taken, phases=phases, steps=rows, drafts=drafts, speculation="Fixed")


@pytest.mark.parametrize(
    ("seconds", "meets"),
    [([0.06, 0.11, 0.21, 0.41], True), ([1.0, 0.01, 0.01, 4.0], False)],
)
def test_useless_drafts_have_a_gain_only_if_the_fitted_cost_meets_the_measurement(
    seconds: list[float], meets: bool
) -> None:
    facts = drafted_iteration(seconds)
    [finding] = [finding for finding in explain([facts]) if finding.cause == "useless drafts"]
    assert (finding.gain is not None) is meets
    assert (finding.field, finding.value) == ("spec.generation.speculation.mode", "Disabled")
    if not meets:
        assert finding.seconds == pytest.approx(0.1 * facts.total), "the time of drafting"
        assert "gain not known" in finding.words


@pytest.mark.parametrize(("busy", "scored"), [(0.0, [3.0, 3.5, 9.0]), (8.0, [3.0, 3.5, 9.0]), (0.0, [9.0, 9.0, 9.0])])
def test_a_replay_of_scoring_after_the_whole_batch_ends_as_measured(busy: float, scored: list[float]) -> None:
    """A check of this replay could not fail, so the cause has none."""
    samples = SampleFacts(
        prompts=[8.0] * 3,
        responses=[9.0] * 3,
        begun=[0.0] * 3,
        finished=[1.0, 2.0, 2.0],
        scored=scored,
        workers=[0] * 3,
    )
    task = TaskFacts(name="judged", call=False, last=3, busy=busy, setup=0, per_token=0)
    facts = recorded_facts(total=9.0, samples=samples, tasks=[task], overlap="Disabled")
    apart, latency = scoring_overlap._pace(facts, samples)
    assert scoring_end([2.0] * 3, apart, latency) == pytest.approx(9.0)


@pytest.mark.parametrize(("call", "cause"), [(True, "slow reward"), (False, "too few inference workers")])
def test_a_queue_of_scores_is_the_reward_or_a_model_by_what_fills_it(call: bool, cause: str) -> None:
    samples = SampleFacts(
        prompts=[8.0] * 20,
        responses=[100.0] * 20,
        begun=[0.0] * 20,
        finished=[1.0] * 20,
        scored=[1.0 + 0.5 * (place + 1) for place in range(20)],
        workers=[0, 1] * 10,
    )
    task = TaskFacts(name="judged", call=call, last=20, busy=0 if call else 9, setup=0, per_token=0)
    facts = recorded_facts(
        total=12.0, phases={"Generating": 1.0, "Scoring": 10.0}, samples=samples, tasks=[task], max_batch_size=10
    )
    finding = explain([facts])[0]
    assert (finding.cause, finding.field) == (cause, "spec.inference.replicas")
    workers = int(finding.value)
    assert finding.seconds == pytest.approx(9.5 - 9.5 / workers, rel=0.01), "the last sample's own takes as long"


@pytest.mark.parametrize(
    ("call", "first", "apart", "saved"),
    [(True, 0.5, 0.5, 9.5), (True, 5.0, 0.0, 0.0), (True, 4.0, 0.25, 4.75), (False, 4.0, 0.25, 8.3125)],
)
def test_scoring_that_does_not_wait_saves_all_but_the_time_of_the_last_score(
    call: bool, first: float, apart: float, saved: float
) -> None:
    """Twenty responses finish 1 s apart. The first score comes after `first` seconds, and the others `apart` seconds
    apart. One call takes as long as the first score, and one response its share of a model's pass.
    """
    samples = SampleFacts(
        prompts=[8.0] * 20,
        responses=[100.0] * 20,
        begun=[0.0] * 20,
        finished=[1.0 + place for place in range(20)],
        scored=[20.0 + first + apart * place for place in range(20)],
        workers=[0, 1] * 10,
    )
    end = max(samples.scored)
    phases = {"Generating": 20.0, "Scoring": end - 20.0}
    task = TaskFacts(name="judged", call=call, last=20, busy=0 if call else end - 20.0, setup=0, per_token=0)
    facts = recorded_facts(
        total=end, phases=phases, samples=samples, tasks=[task], overlap="Disabled", max_batch_size=10
    )
    found = [finding for finding in explain([facts]) if finding.field == "spec.inference.overlap"]
    assert [finding.seconds for finding in found] == ([pytest.approx(saved)] if saved else [])


@pytest.mark.parametrize(("tokens_replayed", "score_batch"), [(True, 1), (False, SCORE_BATCH)])
def test_the_tail_of_a_deterministic_job_is_simulated_with_samples_scored_one_by_one(
    tokens_replayed: bool, score_batch: int
) -> None:
    """They were once simulated as scored sixteen at once, which no worker of such a job does."""
    recorded = read_facts(RUNS / "long-tail.jsonl")[-1]
    facts = recorded.model_copy(
        update={"settings": recorded.settings.model_copy(update={"tokens_replayed": tokens_replayed})}
    )
    observed = decode_costs(facts.steps)
    assert observed is not None
    assert long_tail._stage_costs(facts, observed).score_batch == score_batch
