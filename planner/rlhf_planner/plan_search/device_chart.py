"""Draws the devices of a plan as text, one row per group.

Pure; where a job has more devices than the width, many share one character, which the last line says.
"""

from __future__ import annotations

from rlhf_api.device_sizes import device_use
from rlhf_api.job import RLHFJobSpec
from rlhf_planner.plan_search.device_plan import DevicePlan
from rlhf_planner.training_layouts import layout_words

MARKS = {"generation": "█", "inference": "▒", "training": "░", "turns": "▓", "idle": "·"}


def device_chart(spec: RLHFJobSpec, plan: DevicePlan, devices: int, width: int = 64) -> list[str]:
    """Return lines that show how a plan shares so many devices among its groups."""
    use, ranks = device_use(spec, plan.engine_tensor), plan.parallelism.ranks
    layout = layout_words(plan.parallelism)
    rows: list[tuple[str, int, str, str]] = []
    generation = plan.generation_workers
    if plan.placement == "Colocated":
        rows.append(("generation + training", ranks * use.generation, MARKS["turns"], f"{_workers(ranks)}; {layout}"))
        generation -= ranks
    tensor = f" of {plan.engine_tensor} devices" if plan.engine_tensor > 1 else ""
    if generation:
        text = f"{_workers(generation)}{tensor}"
        rows.append(("generation", generation * use.generation, MARKS["generation"], text))
    if plan.inference_workers:
        inference = plan.inference_workers
        rows.append(("inference", inference * use.inference, MARKS["inference"], _workers(inference)))
    if plan.placement == "Dedicated":
        rows.append(("training", ranks * use.training, MARKS["training"], layout))
    if (idle := devices - sum(count for _, count, _, _ in rows)) > 0:
        rows.append(("idle", idle, MARKS["idle"], ""))
    each = max(1, -(-devices // width))
    name = max(len(label) for label, *_ in rows)
    lines = [
        f"{label:<{name}}  {mark * max(1, round(count / each)) if count else ''} {count}{': ' if text else ''}{text}"
        for label, count, mark, text in rows
    ]
    return lines + ([f"one character: {each} devices"] if each > 1 else [])


def _workers(count: int) -> str:
    return f"{count} worker{'s' if count > 1 else ''}"
