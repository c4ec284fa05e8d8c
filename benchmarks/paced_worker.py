"""A real worker process on a device of stated speed: `python -m benchmarks.paced_worker`, started by `pinned_workers`.

Everything is the worker's own (models, tokens, log-probabilities, caches, migration, messages); only that a decode
step and a pass of scoring never end before the time that `StepPace` says they take; what guessing tokens takes comes
on top.
What a shared, noisy machine needs for them hides below that, so that two iterations which do the same take the same
time, and more workers than cores can be had: what is measured is what the coordinator makes of the samples, and what
its control and the transfers cost.
Rule: nothing is ever made faster. Work that really takes longer is counted, in the worker's log: a run with much of it
measured its machine.
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
"""Environment variable that holds a `StepPace` as JSON."""
SAID_EVERY = 1000
"""Steps and passes between two lines of the log."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepPace:
    """Seconds of work on the device that is stood in for."""

    step: float
    """A decode step."""
    row: float
    """For each row of it: a sample, or a drafted token of one."""
    key: float
    """For each key that it reads."""
    scoring: float
    """A pass of scoring."""
    token: float
    """For each token in it, padding included."""

    def environment(self) -> dict[str, str]:
        """What a worker process reads it from."""
        return {PACE: json.dumps(asdict(self))}


class Pacer:
    """Holds work back until its time is over."""

    def __init__(self) -> None:
        self.done = self.late = 0

    def wait(self, started: float, seconds: float) -> None:
        """Until so long after `started`."""
        left = started + seconds - time.perf_counter()
        self.done += 1
        if left > 0:
            time.sleep(left)
        else:
            self.late += 1
        if self.done % SAID_EVERY == 0:
            log.info("%d steps and passes were paced, %d were late", self.done, self.late)


def pace_workers(pace: StepPace) -> Pacer:
    """From now on engines and scorers of this process go at this pace."""
    from rlhf_common.samples import ScoringSample
    from rlhf_workers.generation.speculation.speculator import Speculator, Verified
    from rlhf_workers.generation.torch_engine.engine import TorchEngine
    from rlhf_workers.inference.model_scorer import PAD, TokenScorer

    pacer, step, score, verified = Pacer(), TorchEngine.step, TokenScorer.score, Speculator.verified

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

    def learn_paced(
        speculator: Speculator, outcomes: Sequence[Verified], rows: int, keys: int, drafting: float, passing: float
    ) -> None:
        """What a pass costs is learned as it is on the device that is stood in for."""
        seconds = pace.step + pace.row * rows + pace.key * keys
        verified(speculator, outcomes, rows, keys, drafting, max(passing, seconds))

    _replace(TorchEngine, "step", paced_step)
    _replace(Speculator, "verified", learn_paced)
    _replace(TokenScorer, "score", paced_score)
    return pacer


def _replace(owner: type, name: str, by: Callable[..., Any]) -> None:
    setattr(owner, name, by)


def main() -> int:
    """Exit code of the worker."""
    from rlhf_workers.__main__ import main as run_worker

    pace_workers(StepPace(**json.loads(os.environ[PACE])))
    return run_worker()


if __name__ == "__main__":
    sys.exit(main())
