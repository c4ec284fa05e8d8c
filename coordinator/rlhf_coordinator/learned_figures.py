"""Figures for the plan search that a run of the job has shown: lengths, measured costs, seconds of training.

They are read from the run folder, which is untrusted.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rlhf_api.job import RLHFJob
from rlhf_api.protocol import read_job
from rlhf_common.json_document import parse_json
from rlhf_coordinator.model_sizes import read_shapes, read_sizes
from rlhf_coordinator.reports.trackers import facts_jsonl
from rlhf_coordinator.state.sample import ITEM_BYTES
from rlhf_coordinator.storage.journal import unframe
from rlhf_coordinator.storage.journal_pb2 import Record
from rlhf_planner.inter_stage.costs import JOB_KEY, StageCosts
from rlhf_planner.inter_stage.lengths import WINDOW, LengthModel
from rlhf_planner.plan_search.cost_document import COSTS_FILE, CostDocument, CostDocumentError
from rlhf_planner.plan_search.cost_figures import CostFigure, EngineProfile, FigureSource, PlanCosts, device_figures
from rlhf_planner.plan_search.learned_training import learned_compute, learned_rest, observed_seconds
from rlhf_planner.plan_search.training_choices import own_settings
from rlhf_planner.plan_search.training_seconds import mini_batches_of, training_times
from rlhf_planner.plan_search.workload import Workload, assumed_lengths
from rlhf_planner.speculation.assumed_gain import assumed_forecast
from rlhf_planner.speculation.forecast import NO_SPECULATION

RAN_JOB: Final = "job.json"
"""Name of the file with the resolved job in a run folder."""
PLAN_KEY: Final = "devicePlan"
"""Key of the plan for spec.devices in the journal's facts about the job."""


def teaches(run: Path) -> bool:
    """Return whether a run folder has costs of generation or of training."""
    return measured_costs(run) is not None or (run / COSTS_FILE).is_file()


def read_workload(job: RLHFJob, run: Path | None) -> tuple[Workload, tuple[str, ...]]:
    """Return the workload of a resolved job, and what it assumes of lengths. Raises UnplannableError.

    `run` teaches the lengths; None assumes them.
    """
    lengths, prompts, guessed = job_lengths(job, run)
    source = FigureSource.LEARNED if lengths.samples else FigureSource.ASSUMED
    sizes, shapes = read_sizes(job.spec), read_shapes(job.spec)
    return Workload(job.spec, sizes, shapes, lengths, tuple(prompts), source), guessed


def run_workload(run: Path) -> Workload | None:
    """Return the workload of the job that ran in a folder; None if the folder does not show it."""
    try:
        return read_workload(read_job(parse_json((run / RAN_JOB).read_bytes())), run)[0]
    except (OSError, ValueError):
        return None


def run_costs(job: RLHFJob, run: Path | None) -> tuple[PlanCosts, list[str]]:
    """Return the costs of the job's devices: those that a run has shown, otherwise public figures; and notes about
    them."""
    costs = device_figures(job.spec)
    return (costs, []) if run is None else learned_figures(job, costs, run, run_workload(run))


def learned_figures(job: RLHFJob, costs: PlanCosts, run: Path, ran: Workload | None) -> tuple[PlanCosts, list[str]]:
    """Return the costs with what a run of the job has shown, and notes that name the run.

    `ran` is the workload of the run; None if it is unknown.
    """
    notes = []
    measured = measured_costs(run)
    if measured is not None:
        stage, _ = with_drafts(job, measured, assumed=False)
        tensor = (job.spec if ran is None else ran.spec).generation.parallelism.tensor
        costs = replace(costs, engine=EngineProfile(stage, tensor, FigureSource.LEARNED))
        notes.append(f"costs of generation and scoring are those of {run}")
    profiled = _profiled(costs, run)
    if profiled is not None:
        costs = profiled
        notes.append(f"costs of training are measured, in {run / COSTS_FILE}")
    return (costs, notes) if ran is None else _with_training(costs, notes, run, ran)


def _profiled(costs: PlanCosts, run: Path) -> PlanCosts | None:
    """Return the costs with those that the ranks of a run have measured; None if they have not."""
    try:
        return CostDocument.read((run / COSTS_FILE).read_bytes()).applied(costs)
    except (OSError, CostDocumentError):
        return None


def _with_training(costs: PlanCosts, notes: list[str], run: Path, ran: Workload) -> tuple[PlanCosts, list[str]]:
    """Return the costs and notes with what the iterations of a run have shown of training."""
    first = planned_since(run)
    try:
        profiles = [each for each in facts_jsonl.read_facts(run / facts_jsonl.FILE) if each.iteration >= first]
    except OSError:
        return costs, notes
    settings = own_settings(ran.spec)
    if {profile.role for profile in costs.layers}.issuperset(ran.trained):
        after = training_times(ran, costs, settings).after_schedules
        rest = learned_rest(profiles, mini_batches_of(ran), after, first)
        if rest is None:
            return costs, notes
        seconds = f"an iteration of training has {rest.value:.3g} s outside of its mini-batches, as in {run}"
        return replace(costs, iteration_seconds=rest), [*notes, seconds]

    def predict(factor: float) -> float:
        return training_times(ran, replace(costs, compute=CostFigure(factor)), settings).total

    compute = learned_compute(predict, observed_seconds(profiles, first))
    if compute is None:
        return costs, notes
    factor = f"computing in training takes {compute.value:.3g} times the roofline's time, as in {run}"
    return replace(costs, compute=compute), [*notes, factor]


def planned_since(run: Path) -> int:
    """Return the first iteration of a run with its present plan for spec.devices; 0 without a plan."""
    try:
        return int(journal_facts(run)[PLAN_KEY].get("since", 0))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0


def journal_facts(run: Path) -> dict[str, Any]:
    """Return the journal's facts about the job of a run. Raises OSError, ValueError."""
    facts: dict[str, Any] = parse_json((run / "journal" / "job.json").read_bytes())
    return facts


def measured_costs(folder: Path) -> StageCosts | None:
    """Return the costs that a run measured; None if its journal shows none."""
    try:
        return StageCosts.from_document(journal_facts(folder)[JOB_KEY]["costs"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def with_drafts(job: RLHFJob, costs: StageCosts, *, assumed: bool) -> tuple[StageCosts, tuple[str, ...]]:
    """Return (costs with the effect of drafts in this job, assumptions). For a job that ran, the effect is the measured
    one."""
    settings = job.spec.generation.speculation
    if settings.mode == "Disabled":
        return replace(costs, speculation=NO_SPECULATION), ()
    always = settings.mode == "Fixed"
    if not assumed:
        return replace(costs, speculation=replace(costs.speculation, zero_allowed=not always)), ()
    forecast = assumed_forecast(costs.decode, costs.max_batch_size, settings.max_tokens, always=always)
    words = "no run has drafted yet: every other drafted token is taken to be right, and drafting to cost nothing"
    return replace(costs, speculation=forecast), (words,)


def job_lengths(job: RLHFJob, run: Path | None) -> tuple[LengthModel, list[int], tuple[str, ...]]:
    """Return (model of response lengths, prompt lengths of one batch, assumptions), lengths in tokens."""
    model, prompts = assumed_lengths(job.spec)
    samples, assumptions = len(prompts), []
    if run is not None:
        unread: list[str] = []
        past_prompts = _prompt_lengths(run, unread)
        if past_prompts:
            prompts = [past_prompts[index % len(past_prompts)] for index in range(samples)]
        window = max(1, job.spec.prompts.length_window)
        segments = sorted((run / "journal").glob("iteration-*.log"))[-WINDOW * window :]
        for first in range(0, len(segments), window):  # an iteration of a sorted window has like lengths
            chosen = segments[first : first + window]
            records = [record for segment in chosen for record in _records(segment, "finished", unread)]
            model = model.with_batch((prompts[0], len(r.finished.tokens.data) // ITEM_BYTES) for r in records)
        assumptions += unread
    if not model.samples:
        assumptions.append(
            "response lengths are taken to be log-normal: the median at an eighth of maxResponseTokens, "
            "one in a hundred at the limit"
        )
    if run is None:
        assumptions.append("prompts are taken to be half of maxPromptTokens long")
    return model, prompts, tuple(assumptions)


def _prompt_lengths(run: Path, unread: list[str]) -> list[int]:
    lengths: list[int] = []
    for file in sorted((run / "journal").glob("prompts-*.log")):
        lengths = [len(r.prompt.tokens) // ITEM_BYTES for r in _records(file, "prompt", unread)] or lengths
    return [length for length in lengths if length]


def _records(file: Path, kind: str, unread: list[str]) -> list[Record]:
    return [record for record in file_records(file, unread) if record.WhichOneof("record") == kind]


def file_records(file: Path, unread: list[str]) -> list[Record]:
    """Return the records of a journal's file; if it cannot be read, none, and `unread` gets a sentence about it."""
    try:
        return [record for record, _ in unframe(file.read_bytes())]
    except OSError as error:
        why = f"{file} cannot be read ({error.strerror or error})"
        unread.append(f"lengths do not include a file of the run's journal: {why}")
        return []
