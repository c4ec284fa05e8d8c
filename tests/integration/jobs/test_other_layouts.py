"""A real job that is stopped, and resumed with another layout of its ranks, learns the same as undisturbed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.jobs.chaos import run_job
from tests.support.jobs.local_job import write_job

from rlhf_coordinator.reports.trackers.metrics_jsonl import read_metrics

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

ITERATIONS = 6
LAYOUTS = (
    {"backend": "megatron", "parallelism.pipeline": 1, "parallelism.tensor": 2},
    {
        "backend": "torch",
        "parallelism.pipeline": 1,
        "parallelism.data": 2,
        "parallelism.shard": 2,
        "parallelism.offloadOptimizer": "true",
    },
    {"backend": "torch", "parallelism.pipeline": 2},
)
"""Layouts: tensor groups of Megatron's layers; sharded models with moments in host memory; pipeline stages."""


def options(layout: dict[str, object]) -> Iterator[str]:
    for field, value in layout.items():
        yield from ("--set", f"spec.training.{field}={value}")


def test_a_job_goes_on_with_other_backends_and_layouts(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, iterations=ITERATIONS, every=2)
    straight = run_job(manifest, tmp_path / "straight")
    assert straight.code == 0, straight.output[-3000:]
    run = tmp_path / "run"
    for number, layout in enumerate(LAYOUTS, 1):
        last = number == len(LAYOUTS)
        chosen = [*options(layout), *(["--resume"] if number > 1 else [])]
        ended = run_job(manifest, run, options=chosen, interrupt_after=None if last else 2 * number)
        assert ended.code == (0 if last else 130), ended.output[-3000:]
    lines = list(read_metrics(run / "metrics.jsonl"))
    undisturbed_lines = list(read_metrics(tmp_path / "straight" / "metrics.jsonl"))
    assert [line["iteration"] for line in lines] == list(range(ITERATIONS))
    for mine, undisturbed in zip(lines, undisturbed_lines, strict=True):
        # Only float32 sums in another order differ; a token would differ if its random number fell exactly in between.
        for name in (
            "reward",
            *(f"training/{model}/loss" for model in ("actor", "critic")),
            *(f"training/gradient_norm/{model}" for model in ("actor", "critic")),
        ):
            assert mine[name] == pytest.approx(undisturbed[name], rel=1e-3, abs=1e-4), (mine["iteration"], name)
