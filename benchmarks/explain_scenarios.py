"""The scenarios of `explain.py`: a job of paced workers with one cause injected, and how its remedy is applied."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.paced_worker import StepPace

from rlhf_planner.explain.finding import Finding

QUICK_REWARD = "def score(prompt, response, record):\n    return float(len(response) % 7)\n"
SLOW_REWARD = "import time\n\n\ndef score(prompt, response, record):\n    time.sleep(1.0)\n    return 1.0\n"
PACE = StepPace(0.08, 8e-4, 4e-7, 0.02, 8e-6)
"""Seconds: a decode step of one sample 81 ms, of 24 about 100 ms; scoring next to nothing. Slow on purpose:
what a shared machine needs for a step, and for what is not paced, hides below that."""


@dataclass(frozen=True)
class InjectedCause:
    """One job."""

    cause: str
    """Name of the cause that is injected, as findings have it."""
    generation: int = 2
    inference: int = 1
    batch: int = 48
    max_tokens: int = 64
    rows: int = 24
    pace: StepPace = PACE
    speeds: tuple[float, ...] = ()
    """How many times as long everything takes on each generation worker; empty: the same on all."""
    reward: str = QUICK_REWARD
    repeated: float = 0.0
    inter_stage: str = "Disabled"
    overlap: str = "Enabled"
    speculation: dict[str, Any] = field(default_factory=lambda: {"mode": "Disabled"})
    checkpoints: int = 0
    """Iterations between two; 0: none."""
    evaluations: int = 0
    """Iterations between two; 0: none."""
    amortized: bool = False
    """The remedy does it seldom, not never: it is measured over as many iterations as it needs."""

    def spec(self, folder: Path) -> dict[str, Any]:
        """What the manifest has."""
        spec: dict[str, Any] = {
            "generation": {
                "replicas": self.generation,
                "maxBatchSize": self.rows,
                "speculation": self.speculation,
            },
            "inference": {"replicas": self.inference, "incremental": "Disabled", "overlap": self.overlap},
            "fusion": {"interStage": {"mode": self.inter_stage, "balance": "Disabled"}},
        }
        if self.checkpoints:
            spec["checkpoints"] = {"path": str(folder / "checkpoints"), "every": self.checkpoints}
        if self.evaluations:
            spec["evaluation"] = {
                "every": self.evaluations,
                "promptCount": 8,
                "samplesPerPrompt": 4,
                "temperature": 1.0,
            }
        return spec

    def changed(self, finding: Finding) -> "InjectedCause":
        """The job with what a finding says changed. Raises ValueError for a field that no scenario is about."""
        match finding.field:
            case "":
                return replace(self, speeds=())
            case "spec.inference.replicas":
                return replace(self, inference=int(finding.value))
            case "spec.generation.replicas":
                return replace(self, generation=int(finding.value))
            case "spec.generation.maxBatchSize":
                return replace(self, rows=int(finding.value))
            case "spec.fusion.interStage.mode":
                return replace(self, inter_stage=finding.value)
            case "spec.inference.overlap":
                return replace(self, overlap=finding.value)
            case "spec.generation.speculation.mode":
                return replace(self, speculation={"mode": finding.value})
            case "spec.checkpoints.every":
                return replace(self, checkpoints=int(finding.value))
            case "spec.evaluation.every":
                return replace(self, evaluations=int(finding.value))
        raise ValueError(f"no scenario changes {finding.field}")


SCENARIOS = {
    "long-tail": InjectedCause(
        "long tail", inference=0, max_tokens=256, pace=StepPace(0.04, 4e-4, 2e-7, 0.01, 2e-3), rows=32
    ),
    "slow-worker": InjectedCause("slow worker", speeds=(1.0, 3.0)),
    "slow-worker-of-three": InjectedCause("slow worker", generation=3, speeds=(1.0, 2.0, 1.0)),
    "slow-reward": InjectedCause("slow reward", reward=SLOW_REWARD),
    "few-inference-workers": InjectedCause("too few inference workers", pace=replace(PACE, token=6e-3)),
    "overlap": InjectedCause("scoring waits for the whole batch", overlap="Disabled", pace=replace(PACE, token=2e-3)),
    "few-generation-workers": InjectedCause(
        "too few generation workers", generation=1, rows=8, pace=replace(PACE, step=0.008, row=0.016)
    ),
    "few-generation-workers-of-two": InjectedCause(
        "too few generation workers", rows=4, pace=replace(PACE, step=0.008, row=0.016)
    ),
    "small-batches": InjectedCause("small batches", rows=4),
    "frequent-checkpoints": InjectedCause(
        "checkpoints", batch=16, max_tokens=16, checkpoints=1, pace=replace(PACE, checkpoint=3.0), amortized=True
    ),
    "frequent-evaluations": InjectedCause("evaluations", batch=8, max_tokens=32, evaluations=1, amortized=True),
    "useless-drafts": InjectedCause(
        "useless drafts",
        batch=24,
        speculation={"mode": "Fixed", "maxTokens": 8},
        pace=replace(PACE, step=0.02, row=0.002),
    ),
}
