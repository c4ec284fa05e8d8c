"""Algorithms in a real local run: interrupted and resumed, it ends with the same weights bit for bit.

Two optimizer steps per iteration, so that ratios differ from 1; one training rank and one generation worker, so that a
run is short. PPO, GRPO, plug-ins and algorithms that generate nothing have their own tests.
"""

from pathlib import Path
from typing import Any, Final

import pytest
from tests.support.jobs.chaos import assert_same_weights, run_job
from tests.support.jobs.local_job import write_job

from rlhf_common.names import ExitCode

pytestmark = pytest.mark.timeout(1800)

ITERATIONS: Final = 6
SMALL: Final = ("generation.replicas=1", "training.parallelism.pipeline=1")
CASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "rloo": ("rloo", {}),
    "reinforce++": ("reinforcePlusPlus", {"gamma": 0.99}),
    "remax": ("remax", {"groupSize": 2}),
    "gspo": ("gspo", {"ratioLevel": "Token"}),
    "cispo": ("cispo", {}),
    "safe-rlhf": ("safeRlhf", {}),
    "dapo": ("dapo", {}),
    "online-dpo": ("onlineDpo", {}),
}
"""Name -> (member of `spec.algorithm`, fields). A new algorithm needs a line here."""


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("case", CASES)
def test_interrupted_and_resumed_is_uninterrupted(case: str, tmp_path: Path) -> None:
    name, fields = CASES[case]
    manifest = write_job(tmp_path, algorithm=name, iterations=ITERATIONS, responses=12, every=2)
    settings = (*SMALL, *(f"algorithm.{name}.{field}={value}" for field, value in fields.items()))
    straight = run_job(manifest, tmp_path / "straight", settings=settings)
    run_job(manifest, tmp_path / "run", settings=settings, interrupt_after=1, code=ExitCode.INTERRUPTED)
    resumed = run_job(manifest, tmp_path / "run", settings=settings, options=["--resume"])
    assert_same_weights(resumed, straight)
    assert resumed.reported("reward") == straight.reported("reward")
    assert len(straight.lines) == ITERATIONS
    ratios = [line["training/actor/ratio_max"] for line in straight.lines if "training/actor/ratio_max" in line]
    assert not ratios or set(ratios) != {1}
