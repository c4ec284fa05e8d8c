"""The jobs of the long tail's benchmark: their workers, their models, and what each is to show."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import pinned_job
from benchmarks.long_tail_policy import write_policy
from benchmarks.paced_worker import StepPace

MAX_TOKENS, ROWS = 1024, 48
SMALL = {"hidden_size": 32, "num_hidden_layers": 1}


@dataclass(frozen=True)
class Scenario:
    """Workers, samples, and what scoring costs."""

    scorer: dict[str, int]
    """Sizes of the reference model."""
    workers: int = 2
    batch: int = 96
    layers: int = 4
    """Of the policy."""
    pace: StepPace | None = None
    """None: workers are as fast as their core."""
    repeated: float = 0.0
    """Share of the tokens that follow by rule, so that they can be drafted."""

    @property
    def pools(self) -> range:
        """Smaller than all workers."""
        return range(1, self.workers)


def paced(token: float, workers: int = 2, batch: int = 96, times: float = 1.0) -> Scenario:
    """Workers of a stated speed: a decode step of one sample with 512 keys 6.1 ms, of 48 with as many 10.9 ms; scoring
    5 ms a pass and `token` seconds a token. `times` as long for everything: more of another's work hides below it."""
    pace = StepPace(0.006, 5e-5, 1e-7, 0.005, token).slower(times)
    return Scenario(SMALL, workers, batch, layers=2, pace=pace)


SCENARIOS = {
    "A": Scenario({"hidden_size": 256, "num_hidden_layers": 12}),
    "B": Scenario(SMALL),
    "C": Scenario({"hidden_size": 256, "num_hidden_layers": 6}),
    "E": Scenario({"hidden_size": 256, "num_hidden_layers": 6}, repeated=0.85),
    "paced-A": paced(1.3e-3),
    "paced-B": paced(2e-6),
    "paced-C": paced(0.65e-3),
    "paced-D": paced(1.3e-3, workers=4, batch=192),
    "paced-E": replace(paced(0.65e-3), repeated=0.85),
    "slow-E": replace(paced(0.65e-3, times=2.0), repeated=0.85),
}


def write_job(folder: Path, scenario: Scenario, iterations: int, speculation: Mapping[str, Any] | None = None) -> Path:
    """Models, prompts, reward and the resolved manifest; `speculation` None: nothing is drafted."""
    write_policy(folder / "policy", scenario.layers, scenario.repeated)
    return pinned_job.write_job(
        folder,
        "long-tail",
        iterations=iterations,
        batch=scenario.batch,
        max_tokens=MAX_TOKENS,
        again=False,  # settings of a round decode the same responses: a later one would draft them by heart
        reference=scenario.scorer,
        generation={
            "replicas": scenario.workers,
            "maxBatchSize": ROWS,
            "speculation": dict(speculation or {"mode": "Disabled"}),
        },
        inference={"replicas": 0, "incremental": "Disabled"},
        fusion={"interStage": {"mode": "Auto", "balance": "Disabled"}},
    )
