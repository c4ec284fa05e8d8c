"""Every algorithm in a real local run: interrupted and resumed, it ends with the same weights bit for bit.

Two optimizer steps per iteration, so that ratios differ from 1; one training rank and one generation worker, so that a
run is short. PPO, GRPO, plug-ins and algorithms that generate nothing have their own tests.
"""

from pathlib import Path
from typing import Any, Final

import pytest
from tests.support.jobs.chaos import Ended, run_job
from tests.support.jobs.local_job import write_job

from rlhf_common.names import ExitCode
from rlhf_coordinator.reports.trackers.metrics_jsonl import read_metrics

pytestmark = pytest.mark.timeout(1800)

ITERATIONS: Final = 6
SMALL: Final = ("spec.generation.replicas=1", "spec.training.parallelism.pipeline=1")
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


def said(*runs: Ended) -> str:
    return "\n".join(run.output[-3000:] for run in runs)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("case", CASES)
def test_interrupted_and_resumed_is_uninterrupted(case: str, tmp_path: Path) -> None:
    name, fields = CASES[case]
    manifest = write_job(tmp_path, algorithm=name, iterations=ITERATIONS, responses=12, every=2)
    chosen = (*SMALL, *(f"spec.algorithm.{name}.{field}={value}" for field, value in fields.items()))
    options = [word for setting in chosen for word in ("--set", setting)]
    straight = run_job(manifest, tmp_path / "straight", options=options)
    interrupted = run_job(manifest, tmp_path / "run", options=options, interrupt_after=1)
    assert (straight.code, interrupted.code) == (0, ExitCode.INTERRUPTED), said(straight, interrupted)
    resumed = run_job(manifest, tmp_path / "run", options=[*options, "--resume"])
    assert resumed.code == 0, said(resumed)
    assert resumed.weights == straight.weights != "", said(resumed)
    lines = [read_metrics(tmp_path / folder / "metrics.jsonl") for folder in ("straight", "run")]
    assert [line["reward"] for line in lines[0]] == [line["reward"] for line in lines[1]]
    assert len(lines[0]) == ITERATIONS
    ratios = [line["training/actor/ratio_max"] for line in lines[0] if "training/actor/ratio_max" in line]
    assert not ratios or set(ratios) != {1}
