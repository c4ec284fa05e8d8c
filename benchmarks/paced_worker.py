"""A real worker process on a simulated device of fixed speed: `python -m benchmarks.paced_worker`.

`pinned_workers` starts it. Models, tokens, log-probabilities, caches, migration and messages are the worker's own. But
no decode step or scoring pass ends before the time in `StepPace`, and drafts are chosen by that time. The time for
prefill and drafting is added.

The pace hides the real time of a shared, noisy machine. So equal iterations take about the same time, and more workers
than cores can run. The benchmark then measures the coordinator's decisions, and the cost of its control and of
transfers.
Rule: no work is ever made faster. Work that takes longer than its pace is counted in the worker's log; a run with much
of it has measured its machine.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

PACE = "RLHF_BENCHMARK_PACE"
"""Environment variable with a `StepPace` as JSON."""
SAID_EVERY = 1000
"""Steps and passes between two log lines."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepPace:
    """Seconds of work on the simulated device."""

    step: float
    """Seconds per decode step."""
    row: float
    """Seconds per row: a sample, or a drafted token of one."""
    key: float
    """Seconds per key that it reads."""
    scoring: float
    """Seconds per scoring pass."""
    token: float
    """Seconds per token in the pass, including padding."""
    gradient: float = 0.0
    """Seconds per micro-batch of a training rank; 0: its own speed."""

    def environment(self) -> dict[str, str]:
        """Return the environment for a worker process."""
        return {PACE: json.dumps(asdict(self))}


class Pacer:
    """Delays work until its time is over."""

    def __init__(self) -> None:
        self.done = self.late = 0

    def wait(self, started: float, seconds: float) -> None:
        """Wait until `seconds` after `started`."""
        left = started + seconds - time.perf_counter()
        self.done += 1
        if left > 0:
            time.sleep(left)
        else:
            self.late += 1
        if self.done % SAID_EVERY == 0:
            log.info("%d steps and passes were paced, %d were late", self.done, self.late)


def pace_workers(pace: StepPace) -> Pacer:
    """Make torch engines, token scorers and training ranks of this process run at this pace."""
    from rlhf_common.samples import ScoringSample
    from rlhf_workers.generation.speculation.speculator import Speculator, Verified
    from rlhf_workers.generation.torch_engine.engine import TorchEngine
    from rlhf_workers.inference.model_scorer import PAD, TokenScorer
    from rlhf_workers.training.trainer import Trainer

    pacer, step, score, verified = Pacer(), TorchEngine.step, TokenScorer.score, Speculator.verified
    execute = Trainer.execute

    def paced_step(engine: TorchEngine) -> Any:
        started = time.perf_counter()
        report = step(engine)
        if report.rows:
            rows = max(report.rows, report.pass_rows)
            seconds = pace.step + pace.row * rows + pace.key * report.keys
            pacer.wait(started, (report.prefill_ns + report.draft_ns) / 1e9 + seconds)
        return report

    def paced_score(scorer: TokenScorer, samples: Sequence[ScoringSample]) -> Any:
        started = time.perf_counter()
        answer = score(scorer, samples)
        longest = max(sample.length for sample in samples)
        pacer.wait(started, pace.scoring + pace.token * len(samples) * -(-longest // PAD) * PAD)
        return answer

    def paced_execute(trainer: Trainer, layout: Any, work: Any) -> Any:
        started = time.perf_counter()
        timed = execute(trainer, layout, work)
        pacer.wait(started, pace.gradient * sum(action.kind == "F" for action in layout.row))
        return timed

    def learn_paced(
        speculator: Speculator, outcomes: Sequence[Verified], rows: int, keys: int, drafting: float, passing: float
    ) -> None:
        """Learn the cost of a pass as on the simulated device."""
        seconds = pace.step + pace.row * rows + pace.key * keys
        verified(speculator, outcomes, rows, keys, drafting, max(passing, seconds))

    _replace(TorchEngine, "step", paced_step)
    _replace(Speculator, "verified", learn_paced)
    _replace(TokenScorer, "score", paced_score)
    if pace.gradient:
        _replace(Trainer, "execute", paced_execute)
    return pacer


def _replace(owner: type, name: str, by: Callable[..., Any]) -> None:
    setattr(owner, name, by)


def main() -> int:
    """Run the worker at its pace; return its exit code."""
    from rlhf_workers.__main__ import main as run_worker

    pace_workers(StepPace(**json.loads(os.environ[PACE])))
    return run_worker()


if __name__ == "__main__":
    sys.exit(main())
