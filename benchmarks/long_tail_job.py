"""The jobs of the long-tail benchmark: their workers and models, by scenario."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks import pinned_job
from benchmarks.long_tail_policy import write_policy
from benchmarks.paced_worker import StepPace

MAX_TOKENS, ROWS = 1024, 48
SMALL = {"hidden_size": 32, "num_hidden_layers": 1}


@dataclass(frozen=True)
class Scenario:
    """Workers, samples, and the cost of scoring."""

    scorer: dict[str, int]
    """Sizes of the reference model."""
    workers: int = 2
    batch: int = 96
    layers: int = 4
    """Number of layers of the policy."""
    pace: StepPace | None = None
    """Pace of the workers; None means the speed of their core."""

    @property
    def pools(self) -> range:
        """Pool sizes smaller than all workers."""
        return range(1, self.workers)


def paced(token: float, workers: int = 2, batch: int = 96) -> Scenario:
    """Return a scenario of workers with a fixed speed.

    A decode step takes 6.1 ms for one sample with 512 keys, and 10.9 ms for 48. Scoring takes 5 ms per pass and
    `token` seconds per token.
    """
    return Scenario(SMALL, workers, batch, layers=2, pace=StepPace(0.006, 5e-5, 1e-7, 0.005, token))


SCENARIOS = {
    "A": Scenario({"hidden_size": 256, "num_hidden_layers": 12}),
    "B": Scenario(SMALL),
    "C": Scenario({"hidden_size": 256, "num_hidden_layers": 6}),
    "paced-A": paced(1.3e-3),
    "paced-B": paced(2e-6),
    "paced-C": paced(0.65e-3),
    "paced-D": paced(1.3e-3, workers=4, batch=192),
}


def write_job(folder: Path, scenario: Scenario, iterations: int) -> Path:
    """Write models, prompts, reward and the resolved manifest, without drafting."""
    write_policy(folder / "policy", scenario.layers)
    return pinned_job.write_job(
        folder,
        "long-tail",
        iterations=iterations,
        batch=scenario.batch,
        max_tokens=MAX_TOKENS,
        reference=scenario.scorer,
        generation={
            "replicas": scenario.workers,
            "maxBatchSize": ROWS,
            "speculation": {"mode": "Disabled"},
        },
        inference={"replicas": 0, "incremental": "Disabled"},
        fusion={"interStage": {"mode": "Auto", "balance": "Disabled"}},
    )
