"""The expected gain of fusion and drafts, for `rlhf plan`: from measurements of a run, or from assumptions.

Rule: it reads the newest run in `runs/` that has measured costs. Without one, costs are a roofline of public hardware
figures.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_api.algorithms import ModelKind, graph_of
from rlhf_api.job import RLHFJob
from rlhf_cli.local.run_folder import newest_first
from rlhf_common.names import Group
from rlhf_coordinator.learned_figures import job_lengths, measured_costs, with_drafts
from rlhf_coordinator.model_sizes import read_size
from rlhf_planner.inter_stage.choose import FusionChoice, choose
from rlhf_planner.inter_stage.costs import StageCosts, score_batch_of
from rlhf_planner.inter_stage.forecast import Forecast, IterationSetup
from rlhf_planner.inter_stage.lengths import LengthModel
from rlhf_planner.inter_stage.roofline import CPU_CORE, HOPPER, ModelShape, assumed_costs
from rlhf_planner.inter_stage.simulate import simulate
from rlhf_planner.speculation.forecast import NO_SPECULATION


@dataclass(frozen=True)
class FusionPlan:
    """The forecast of one iteration's generation and inference."""

    choice: FusionChoice | None
    """The choice; None without a forecast."""
    layout: IterationSetup
    costs: StageCosts | None
    lengths: LengthModel
    assumptions: tuple[str, ...] = ()
    missing: str = ""
    undrafted: FusionChoice | None = None
    """The choice with generation.speculation.mode Disabled; None where nothing is drafted, or without a forecast."""


def fusion_plan(job: RLHFJob, runs: Path) -> FusionPlan:
    """Return the forecast of a resolved job; `runs` is the parent of run folders."""
    graph, run = graph_of(job.spec), newest_run(job, runs)
    lengths, prompts, guessed = job_lengths(job, run)
    layout = _layout(job, prompts)
    if not graph.generates:
        return FusionPlan(None, layout, None, lengths, (), f"algorithm {graph.algorithm} generates nothing")
    costs, assumptions, missing = _costs(job, run)
    if costs is None:
        return FusionPlan(None, layout, None, lengths, (), missing)
    costs, supposed = with_drafts(job, costs, assumed=run is None)
    choice = choose(lengths, layout, costs, job.spec.seed)
    plain = replace(costs, speculation=NO_SPECULATION)
    undrafted = choose(lengths, layout, plain, job.spec.seed) if costs.speculation else None
    return FusionPlan(choice, layout, costs, lengths, (*assumptions, *guessed, *supposed), undrafted=undrafted)


def forecasts(plan: FusionPlan) -> list[tuple[str, Forecast]]:
    """Return (title, forecast) without fusion and, if the choice fuses, with it, for the same drawn batch."""
    import numpy as np

    assert plan.choice is not None
    assert plan.costs is not None
    drawn = plan.lengths.draw(np.random.default_rng(0), plan.layout.prompts)
    choice = plan.choice
    off = simulate(drawn, plan.layout, plan.costs, spans=True)
    pictures = [(f"Without fusion: {off.seconds:.3g} s, idle {off.idle_share:.0%}", off)]
    if choice.fused:
        on = simulate(
            drawn, plan.layout, plan.costs, choice.threshold, choice.pool, choice.transfer, model=plan.lengths,
            spans=True,
        )  # fmt: skip
        title = f"Fused at R_t {choice.threshold}, pool {choice.pool}: {on.seconds:.3g} s, idle {on.idle_share:.0%}"
        pictures.append((title, on))
    return pictures


def document(plan: FusionPlan) -> dict[str, Any]:
    """Return the forecast as the object of `--json`."""
    choice = plan.choice
    if choice is None:
        return {"missing": plan.missing}
    return {
        "threshold": choice.threshold,
        "pool": choice.pool,
        "transfer": choice.transfer,
        "seconds": choice.seconds,
        "offSeconds": choice.off_seconds,
        "reason": choice.reason,
        "curve": [point._asdict() for point in choice.curve],
        "assumptions": list(plan.assumptions),
        "speculation": _drafts(plan),
    }


def _drafts(plan: FusionPlan) -> dict[str, Any] | None:
    """Return the expected effect of drafts by batch, and the choice without them; None where nothing is drafted."""
    if plan.undrafted is None:
        return None
    assert plan.costs is not None
    without = plan.undrafted
    return {
        "points": [
            {
                "batch": batch,
                "tokensPerStep": tokens,
                "secondsOverPlain": cost,
                "gain": tokens / cost,
            }
            for batch, tokens, cost in drafts_by_batch(plan.costs)
        ],
        "disabled": {
            "threshold": without.threshold,
            "pool": without.pool,
            "seconds": without.seconds,
            "offSeconds": without.off_seconds,
        },
    }


def drafts_by_batch(costs: StageCosts) -> list[tuple[int, float, float]]:
    """Return (batch size, tokens per sample and step, step seconds relative to a plain step), for powers of two."""
    batches = [1 << power for power in range(costs.max_batch_size.bit_length())]
    tokens, cost = costs.speculation.factors([float(batch) for batch in batches])
    return list(zip(batches, tokens.tolist(), cost.tolist(), strict=True))


# ---------------------------------------------------------------- from the last run


def newest_run(job: RLHFJob, runs: Path) -> Path | None:
    """Return the newest run folder of this job with measured costs; None when there is none."""
    for folder in newest_first(runs, job.name):
        if measured_costs(folder) is not None:
            return folder
    return None


def _costs(job: RLHFJob, run: Path | None) -> tuple[StageCosts | None, tuple[str, ...], str]:
    """Return (costs, assumptions, what is missing)."""
    if run is not None:
        measured = measured_costs(run)
        assert measured is not None
        return replace(measured, max_batch_size=job.spec.generation.max_batch_size), (), ""
    return _assumed(job)


def _assumed(job: RLHFJob) -> tuple[StageCosts | None, tuple[str, ...], str]:
    spec = job.spec
    gpus = spec.generation.gpus_per_replica
    device, devices, width = (HOPPER, gpus, 2) if gpus else (CPU_CORE, 1, 4)
    models, graph = spec.models, graph_of(spec)
    sources = {task.model: models.explicit_source(task.model) for task in graph.tasks_of(Group.INFERENCE)}
    sizes = {role: _model(Path(source.path), width) for role, source in sources.items() if source is not None}
    policy = _model(Path(models.actor.path), width)
    unknown = [role for role, size in {graph.policy: policy, **sizes}.items() if size is None]
    if policy is None or unknown:
        return None, (), f"the models of {', '.join(unknown)} are not on this disk and no run measured their costs"
    scorers = [size for size in sizes.values() if size is not None]
    costs = assumed_costs(
        policy, scorers, device, devices, spec.generation.max_batch_size, replays=spec.replays_tokens,
        score_batch=score_batch_of(spec),
    )  # fmt: skip
    assumptions = [f"costs are assumed, not measured: a roofline of {devices} {device.name} per worker"]
    if any(role.kind is ModelKind.REWARD and models.explicit_source(role) is None for role in sources):
        assumptions.append("the reward function is taken to cost nothing")
    return costs, tuple(assumptions), ""


def _model(folder: Path, width: int) -> ModelShape | None:
    size = read_size(folder)
    if size is None:
        return None
    config = json.loads((folder / "config.json").read_text())
    layers = int((config.get("text_config") or config)["num_hidden_layers"])
    return ModelShape(size.parameters, layers, size.cache_values_per_token * width, width)


def _layout(job: RLHFJob, prompts: Sequence[int]) -> IterationSetup:
    spec, settings = job.spec, job.spec.fusion.inter_stage
    return IterationSetup(
        generation_workers=spec.generation.replicas,
        inference_workers=spec.inference.replicas,
        prompts=tuple(prompts),
        overlap=spec.inference.overlap != "Disabled",
        mode=settings.mode,
        threshold=settings.threshold,
        pool=settings.pool,
        transfer=settings.transfer,
    )
