"""`rlhf plan`: show a job's processes, devices and memory on this machine, and the expected gain of fusion.

Rule: no process of the job is started.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from rich.console import JustifyMethod
from rich.table import Table

from rlhf_api import manifest as manifests
from rlhf_api.job import RLHFJob
from rlhf_cli.console import output, size
from rlhf_cli.critic_overlap_plan import critic_overlap_plan
from rlhf_cli.fusion_plan import FusionPlan, document, drafts_by_batch, forecasts, fusion_plan
from rlhf_cli.layout_plan import TrainingLayouts
from rlhf_cli.length_window_plan import length_window_plan
from rlhf_cli.load_job import load_resolved
from rlhf_cli.local.devices import this_machine
from rlhf_cli.local.errors import RunError
from rlhf_cli.local.local_job import LocalJob, plan_processes
from rlhf_cli.local.pods_to_processes import LocalProcess
from rlhf_cli.local.run_folder import RUNS
from rlhf_cli.long_rounds_plan import long_rounds_plan
from rlhf_cli.output_file import PICTURES, check_output_file
from rlhf_cli.rollout_overlap_plan import rollout_overlap_plan
from rlhf_common.names import ExitCode, Group
from rlhf_coordinator.model_sizes import read_sizes
from rlhf_planner.device_memory import Budget, Estimate, budget, estimates
from rlhf_planner.inter_stage.threshold_chart import threshold_chart

NO_ESTIMATE: Final = Estimate({})


def show_plan(
    path: Path, overrides: Sequence[str], *, as_json: bool, picture: Path | None = None, device_gib: float | None = None
) -> int:
    """Print the plan of a job and return the exit code. Raises ManifestError, RunError, TemplateError."""
    if picture is not None:
        check_output_file("--picture", picture, PICTURES)
    loaded = load_resolved(path, overrides, lambda job: RUNS / f"{job.name}-<time>")
    resolved = loaded.resolved
    local = plan_processes(loaded, this_machine())
    sizes = read_sizes(resolved.spec)
    memory = estimates(resolved.spec, sizes)
    turns = None if resolved.spec.rank_group is Group.TRAINING else budget(resolved.spec, sizes)
    training = TrainingLayouts.from_spec(resolved.spec, sizes, device_gib)
    fusion = fusion_plan(resolved, RUNS)
    critic_overlap = critic_overlap_plan(resolved, RUNS, sizes)
    rollout_overlap = rollout_overlap_plan(resolved, RUNS)
    long_rounds = long_rounds_plan(resolved, RUNS, fusion)
    length_window = length_window_plan(resolved, RUNS, fusion)
    if as_json:
        phases = {"phases": _phases(turns)} if turns else {}
        more = phases | {"fusion": document(fusion), "training": training.document()}
        more |= {"criticOverlap": critic_overlap.document()} if critic_overlap is not None else {}
        more |= {"overlapTraining": rollout_overlap.document()} if rollout_overlap is not None else {}
        more |= {"longRounds": long_rounds.document()} if long_rounds is not None else {}
        more |= {"lengthWindow": length_window.document()} if length_window is not None else {}
        print(json.dumps(_document(resolved, local, memory) | more))
    else:
        _print_tables(resolved, local, memory)
        _print_phases(turns)
        training.print()
        _print_fusion(fusion)
        if critic_overlap is not None:
            critic_overlap.print()
        if rollout_overlap is not None:
            rollout_overlap.print()
        if long_rounds is not None:
            long_rounds.print()
        if length_window is not None:
            length_window.print()
    if picture is not None:
        _draw(fusion, picture)
    return ExitCode.USAGE if training.problem else ExitCode.OK


def _draw(fusion: FusionPlan, picture: Path) -> None:
    """Draw generation and inference without and with fusion, worker by worker."""
    if fusion.choice is None:
        raise RunError(f"--picture {picture}: nothing to draw, {fusion.missing}")
    from rlhf_planner.inter_stage.forecast_figures import draw_forecasts

    layout = fusion.layout
    names = [f"generation-{index}" for index in range(layout.generation_workers)]
    names += [f"inference-{index}" for index in range(layout.inference_workers)]
    try:
        picture.write_bytes(draw_forecasts(forecasts(fusion), names, picture.suffix.lower().removeprefix(".")))
    except OSError as error:
        raise RunError(f"--picture {picture}: {error.strerror}", ExitCode.STORAGE) from error


def _print_fusion(fusion: FusionPlan) -> None:
    out, choice = output(), fusion.choice
    out.print("\nGeneration and inference of one iteration", style="bold")
    if choice is None:
        out.print(f"no forecast: {fusion.missing}", markup=False, soft_wrap=True)
        return
    gain = choice.off_seconds / choice.seconds if choice.seconds > 0 else 1.0
    out.print(
        f"predicted {choice.off_seconds:.3g} s without fusion, {choice.seconds:.3g} s with the choice ({gain:.2f}x)"
    )
    out.print(choice.reason, markup=False, soft_wrap=True)
    _print_drafts(fusion, choice.seconds)
    if len(choice.curve) > 1:
        out.print(threshold_chart(choice, fusion.layout.batch, min(out.width, 100)), markup=False, soft_wrap=True)
    for assumption in fusion.assumptions:
        out.print(f"assumption: {assumption}", markup=False, soft_wrap=True)


def _print_drafts(fusion: FusionPlan, seconds: float) -> None:
    """Print the expected effect of speculative decoding, and the same job without it."""
    without, out = fusion.undrafted, output()
    if without is None or fusion.costs is None:
        return
    gains = [f"{batch}: {tokens:.2f} ({tokens / cost:.2f}x)" for batch, tokens, cost in drafts_by_batch(fusion.costs)]
    out.print(f"drafts, tokens a step (tokens a second) by batch: {', '.join(gains)}", markup=False, soft_wrap=True)
    ratio = without.seconds / seconds if seconds > 0 else 1.0
    out.print(
        f"with generation.speculation.mode Disabled: {without.seconds:.3g} s ({ratio:.2f} times as long), "
        f"R_t {without.threshold}, pool {without.pool}",
        markup=False,
        soft_wrap=True,
    )


def _document(job: RLHFJob, local: LocalJob, memory: dict[Group, Estimate]) -> dict[str, Any]:
    return {
        "job": manifests.dump(job),
        "processes": [
            {
                "name": process.name,
                "group": process.group.value,
                "device": process.device,
                "cores": sorted(process.cores) if process.cores else None,
                "port": process.port,
                "memory": dict(memory.get(process.group, NO_ESTIMATE).parts),
                "memory_host": dict(memory.get(process.group, NO_ESTIMATE).host),
                "memory_total": memory.get(process.group, NO_ESTIMATE).total,
                "memory_unknown": list(memory.get(process.group, NO_ESTIMATE).unknown),
            }
            for process in local.processes
        ],
        "notes": list(local.notes),
    }


def _print_tables(job: RLHFJob, local: LocalJob, memory: dict[Group, Estimate]) -> None:
    out = output()
    out.print(
        yaml.safe_dump(manifests.dump(job), sort_keys=False, default_flow_style=None, width=110),
        markup=False,
        soft_wrap=True,
    )
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
    for heading in ("process", "device", "cores", "port", "memory", "of which"):
        justify: JustifyMethod = "right" if heading in ("port", "memory") else "left"
        table.add_column(heading, justify=justify, no_wrap=heading != "of which")
    for process in local.processes:
        table.add_row(*_row(process, memory.get(process.group, NO_ESTIMATE)))
    out.print(table)
    out.print(
        "\nMemory of each device is estimated: weights, key-value cache at the full batch, gradients and optimizer; "
        "activations come on top. Ports are chosen anew at each start.",
        style="dim",
    )
    for note in local.notes:
        out.print(f"note: {note}", markup=False, soft_wrap=True)


def _phases(turns: Budget) -> dict[str, Any]:
    named = {phase.name: dict(phase.onloaded.parts) for phase in turns.phases}
    return {"awake": named, "peak": turns.peak.name, "host": dict(turns.host.parts)}


def _print_phases(turns: Budget | None) -> None:
    if turns is None:
        return
    out = output()
    out.print("\nMemory of a generation worker and its training rank, in turn", style="bold")
    for phase in turns.phases:
        out.print(f"{phase.name}: {_estimate_text(phase.onloaded)}", markup=False, soft_wrap=True)
    if turns.host.parts:
        out.print(f"host memory, for what sleeps: {_estimate_text(turns.host)}", markup=False, soft_wrap=True)


def _estimate_text(estimate: Estimate) -> str:
    return f"{size(estimate.total)} ({', '.join(_parts(estimate))})"


def _parts(estimate: Estimate) -> list[str]:
    parts = [f"{name} {size(count)}" for name, count in estimate.parts.items()]
    parts += [f"{name} {size(count)} of host memory" for name, count in estimate.host.items()]
    return parts + [f"{role} unknown (not on this disk)" for role in estimate.unknown]


def _row(process: LocalProcess, estimate: Estimate) -> tuple[str, ...]:
    return (
        process.name,
        process.device,
        ",".join(map(str, sorted(process.cores))) if process.cores else "any",
        str(process.port),
        size(estimate.total) if estimate.parts else "",
        ", ".join(_parts(estimate)),
    )
