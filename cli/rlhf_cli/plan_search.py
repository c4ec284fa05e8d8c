"""`rlhf plan --devices N`: search the groups, placement and layouts of a job, print the best, and write its manifest.

The figures come from `--costs`, then from the job's newest run in runs/, then from public hardware figures. No process
of the job is started.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from rlhf_api.job import RLHFJob
from rlhf_cli.console import output, size
from rlhf_cli.load_job import LoadedJob, load_resolved
from rlhf_cli.local.errors import RunError
from rlhf_cli.local.run_folder import RUNS
from rlhf_cli.output_file import check_output_file
from rlhf_cli.teaching_runs import newest_teaching_run
from rlhf_common.names import ExitCode
from rlhf_coordinator.learned_figures import read_workload, run_costs
from rlhf_planner.device_memory import GIBIBYTE
from rlhf_planner.plan_search.cost_document import CostDocument, CostDocumentError
from rlhf_planner.plan_search.cost_figures import PlanCosts
from rlhf_planner.plan_search.device_chart import device_chart
from rlhf_planner.plan_search.device_plan import DevicePlan, manifest_with, refused_manifest
from rlhf_planner.plan_search.iteration_forecast import PlanForecast
from rlhf_planner.plan_search.search import PlanSearch
from rlhf_planner.plan_search.seeded_search import find_plans
from rlhf_planner.plan_search.workload import UnplannableError, Workload

MANIFESTS = (".yaml", ".yml")


@dataclass(frozen=True)
class SearchRequest:
    """Arguments of the command."""

    manifest: Path
    overrides: Sequence[str]
    devices: int
    device_gib: float | None
    """Memory of a device in GiB; None means that memory limits nothing."""
    costs: Path | None
    write: Path | None


@dataclass(frozen=True)
class SearchResult:
    """Plans of one job, the fastest first, beside the job's own."""

    request: SearchRequest
    job: RLHFJob
    data: dict[str, Any]
    """Data of the manifest as written, with overrides."""
    plans: tuple[PlanForecast, ...]
    own: PlanForecast
    notes: tuple[str, ...]

    @property
    def own_words(self) -> str:
        """Why the job's own plan cannot run on these devices; empty if it can."""
        problems = []
        if self.own.devices > self.request.devices:
            problems.append(f"needs {self.own.devices} devices")
        if self.request.device_gib is not None:
            limit = self.request.device_gib * GIBIBYTE
            problems += [
                f"needs {size(memory.total)} in phase {phase}"
                for phase, memory in self.own.memory.items()
                if memory.total > limit
            ]
        return " and ".join(problems)


def show_search(request: SearchRequest, *, as_json: bool) -> int:
    """Search, print and write plans; return the exit code. Raises ManifestError, RunError."""
    _check_write(request)
    result = _search(request)
    if request.write is not None:
        _write(request.write, result)
    if as_json:
        print(json.dumps(_document(result)))
    else:
        _print(result)
    return ExitCode.OK


def _search(request: SearchRequest) -> SearchResult:
    loaded = load_resolved(request.manifest, request.overrides, lambda job: RUNS / f"{job.name}-<time>")
    job, data = loaded.resolved, _data(loaded)
    document = _cost_document(request.costs)
    run = newest_teaching_run(job, RUNS)
    costs, notes = plan_costs(job, document, run)
    device_bytes = None if request.device_gib is None else int(request.device_gib * GIBIBYTE)
    try:
        workload, guessed = read_workload(job, run)
    except UnplannableError as error:
        raise RunError(f"--devices: {error}") from error
    search = job_search(job, data, costs, workload, device_bytes)
    plans = find_plans(search, request.devices, job.spec.seed)
    if not plans:
        limit = "" if request.device_gib is None else f" of {request.device_gib:g} GiB"
        raise RunError(
            f"--devices {request.devices}: no plan of up to so many devices{limit} fits this job: give more devices "
            "or memory, or use smaller models or spec.training.lora"
        )
    if device_bytes is None:
        notes.append("no --device-memory: memory limits no plan")
    missing = [role for role in search.workload.trained if role not in search.workload.shapes]
    if missing:
        notes.append(f"config.json of {', '.join(missing)} states no known shape: activations are not counted")
    if job.spec.training.template and any(found.plan.placement == "Colocated" for found in plans):
        notes.append("Colocated plans leave out spec.training.template: their ranks run in pods of generation")
    return SearchResult(request, job, data, tuple(plans), search.own, (*notes, *guessed))


def job_search(
    job: RLHFJob, data: dict[str, Any], costs: PlanCosts, workload: Workload, device_bytes: int | None
) -> PlanSearch:
    """Return the search of a resolved job with the data of its manifest."""

    def accepts(plan: DevicePlan) -> bool:
        return not refused_manifest(manifest_with(data, job, plan))

    return PlanSearch(workload, costs, device_bytes, accepts)


def _data(loaded: LoadedJob) -> dict[str, Any]:
    data = loaded.document.data
    assert isinstance(data, dict), "a valid manifest is a mapping"
    return data


def plan_costs(job: RLHFJob, document: CostDocument | None, run: Path | None) -> tuple[PlanCosts, list[str]]:
    """Return the costs of the job's devices, and notes on their sources. Raises RunError for invalid engine costs."""
    costs, notes = run_costs(job, run)
    if document is not None:
        try:
            return document.applied(costs), [*notes, "figures of --costs replace assumed ones"]
        except CostDocumentError as error:
            raise RunError(f"--costs: {error}") from error
    rest = "all other" if notes else "all"
    return costs, [
        *notes,
        f"{rest} figures are assumed: a roofline of one {costs.device_name} and public link speeds",
    ]


def _cost_document(path: Path | None) -> CostDocument | None:
    if path is None:
        return None
    try:
        return CostDocument.read(path.read_bytes())
    except OSError as error:
        raise RunError(f"--costs {path}: {error.strerror}; give a JSON file of costs") from error
    except CostDocumentError as error:
        raise RunError(f"--costs {path}: {error}") from error


# ---------------------------------------------------------------- output


def _check_write(request: SearchRequest) -> None:
    if request.write is None:
        return
    check_output_file("--write", request.write, MANIFESTS)
    manifest, target = request.manifest.absolute(), request.write.absolute()
    if manifest == target:
        raise RunError(f"--write {request.write}: is the manifest itself; give another name")
    if manifest.parent != target.parent:
        raise RunError(
            f"--write {request.write}: relative paths of a manifest start at its folder; give a file in "
            f"{manifest.parent}"
        )


def _write(path: Path, result: SearchResult) -> None:
    data = manifest_with(result.data, result.job, result.plans[0].plan)
    try:
        path.write_text(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=110))
    except OSError as error:
        raise RunError(f"--write {path}: {error.strerror}", ExitCode.STORAGE) from error


def _document(result: SearchResult) -> dict[str, Any]:
    return {
        "devices": result.request.devices,
        "plans": [_entry(plan) | {"gain": result.own.seconds / plan.seconds} for plan in result.plans],
        "own": _entry(result.own) | {"problem": result.own_words},
        "notes": list(result.notes),
    }


def _entry(forecast: PlanForecast) -> dict[str, Any]:
    plan = forecast.plan
    return {
        "devices": forecast.devices,
        "placement": plan.placement,
        "generation": {
            "replicas": plan.generation_workers,
            "tensor": plan.engine_tensor,
            "maxBatchSize": plan.max_batch_size,
        },
        "inference": {"replicas": plan.inference_workers},
        "training": {
            "parallelism": plan.parallelism.model_dump(mode="json", by_alias=True, exclude_none=True),
            "microBatchSize": plan.micro_batch_size,
            "activationCheckpointing": plan.activation_checkpointing,
            "criticOverlap": plan.critic_overlap,
        },
        "tail": {"threshold": forecast.rollout.threshold, "pool": forecast.rollout.pool},
        "seconds": forecast.seconds,
        "stages": {name: {"seconds": stage.value, "source": stage.source} for name, stage in forecast.stages.items()},
        "training_seconds": {role: dict(parts) for role, parts in forecast.training.models.items()},
        "memory": {phase: memory.total for phase, memory in forecast.memory.items()},
        "memory_unknown": sorted({name for memory in forecast.memory.values() for name in memory.unknown}),
        "bound": forecast.bound,
        "source": forecast.source,
    }


def _print(result: SearchResult) -> None:
    out = output()
    devices = result.request.devices
    out.print(f"Plans of up to {devices} device{'s' * (devices > 1)}, seconds per iteration", style="bold")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("", "s", "gain", "devices", "groups", "training", "generate", "score", "train", "publish",
                    "switch", "memory", "bound by"):  # fmt: skip
        table.add_column(heading, no_wrap=heading != "bound by")
    for number, plan in enumerate(result.plans, 1):
        table.add_row(str(number), *_row(plan, result.own.seconds))
    table.add_row("own", *_row(result.own, result.own.seconds))
    out.print(table)
    out.print("m: measured, l: learned, a: assumed. Memory: the largest phase of a device.", style="dim")
    if result.own_words:
        out.print(f"the job's own plan {result.own_words}", markup=False, soft_wrap=True)
    out.print("\nThe best plan", style="bold")
    for line in device_chart(result.job.spec, result.plans[0].plan, devices):
        out.print(line, markup=False, soft_wrap=True)
    for note in result.notes:
        out.print(f"note: {note}", markup=False, soft_wrap=True)


def _row(forecast: PlanForecast, own_seconds: float) -> tuple[str, ...]:
    plan, stages = forecast.plan, forecast.stages
    times = [
        f"{stages[name].value:.3g} {stages[name].source[0]}" if name in stages else ""
        for name in ("generate", "score", "train", "publish", "switch")
    ]
    peak = max(memory.total for memory in forecast.memory.values())
    gain = f"{own_seconds / forecast.seconds:.2f}x"
    words = (str(forecast.devices), plan.groups, plan.training)
    return f"{forecast.seconds:.3g}", gain, *words, *times, size(peak), forecast.bound
