"""A real job that is stopped, and resumed with another layout of its ranks, learns the same as undisturbed."""

from pathlib import Path

import pytest
from tests.support.jobs.chaos import run_job
from tests.support.jobs.local_job import write_job

from rlhf_common.names import ExitCode

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

ITERATIONS = 6
LAYOUTS = (
    ("megatron", "{pipeline: 1, tensor: 2}"),
    ("torch", "{pipeline: 1, data: 2, shard: 2, offloadOptimizer: true}"),
    ("torch", "{pipeline: 2}"),
)
"""Layouts: tensor groups of Megatron's layers; sharded models with moments in host memory; pipeline stages."""


def test_a_job_goes_on_with_other_backends_and_layouts(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, iterations=ITERATIONS, every=2)
    straight = run_job(manifest, tmp_path / "straight")
    for number, (backend, parallelism) in enumerate(LAYOUTS, 1):
        last = number == len(LAYOUTS)
        ended = run_job(
            manifest,
            tmp_path / "run",
            settings=(f"training.backend={backend}", f"training.parallelism={parallelism}"),
            options=["--resume"] if number > 1 else [],
            interrupt_after=None if last else 2 * number,
            code=0 if last else ExitCode.INTERRUPTED,
        )
    assert [line["iteration"] for line in ended.lines] == list(range(ITERATIONS))
    for mine, undisturbed in zip(ended.lines, straight.lines, strict=True):
        # Only float32 sums in another order differ; a token would differ if its random number fell exactly in between.
        for name in (
            "reward",
            *(f"training/{model}/loss" for model in ("actor", "critic")),
            *(f"training/gradient_norm/{model}" for model in ("actor", "critic")),
        ):
            assert mine[name] == pytest.approx(undisturbed[name], rel=1e-3, abs=1e-4), (mine["iteration"], name)
