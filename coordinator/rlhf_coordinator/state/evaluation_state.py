"""What is known of the evaluation of a weight version: its samples in a ledger of their own, and earlier results.

A sample of an evaluation is named by (weight version, FIRST_SAMPLE + its index), so no message about one can be taken
for one about a sample that is trained on: the two are in different ledgers and never meet.
Rule: plain data; `rlhf_coordinator.evaluation` changes it, the scheduler reads it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rlhf_api.algorithms import Graph, Scope, Task
from rlhf_common.samples import FIRST_EVALUATION_SAMPLE
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.sample import SampleState

FIRST_SAMPLE: Final = FIRST_EVALUATION_SAMPLE
"""Number of the first sample of an evaluation in messages."""
FINISHED: Final = (SampleState.GENERATED, SampleState.SCORED, SampleState.FAILED)


@dataclass(frozen=True)
class EvaluationResult:
    """What came of one evaluation."""

    version: int
    metrics: Mapping[str, float]
    """By name, without the prefix `evaluation/`."""


@dataclass
class EvaluationState:
    """The evaluation in progress, and those before it. Times are seconds of the monotonic clock."""

    ledger: Ledger | None = None
    """Of the version that is evaluated, which is its iteration; None: none is."""
    begun: float = 0.0
    ended: float = 0.0
    """When its last response was judged; 0: not yet."""
    waits_since: float = 0.0
    """Since when the iteration waits for it alone; 0: it does not."""
    waited: float = 0.0
    """Seconds for which the iteration waited before."""
    deferred: bool = False
    """One was given up: the next version is evaluated in its place."""
    before_training: bool = False
    """Its responses are decoded before the batch is trained on, as ranks take the devices of who decodes."""
    results: list[EvaluationResult] = field(default_factory=list)
    """Of all evaluations of the run, in order."""

    @property
    def unfinished(self) -> bool:
        """Whether an evaluation is in progress."""
        return self.ledger is not None and not self.ledger.all_scored

    @property
    def decodes(self) -> bool:
        """Whether one has responses that are not complete."""
        return self.ledger is not None and not self.ledger.all_generated

    @property
    def holds_training(self) -> bool:
        """Whether the batch must not be trained on yet."""
        return self.before_training and self.decodes

    def needs(self, worker: str) -> bool:
        """Return whether a worker decodes for it, or is to."""
        ledger = self.ledger
        if ledger is None or ledger.all_generated:
            return False
        return bool(ledger.decoding_on(worker) or ledger.queued(1) or ledger.isolated())

    def progress(self) -> str:
        """Return in words how far it is; empty when none is in progress."""
        if self.ledger is None or not self.unfinished:
            return ""
        judged = self.ledger.count(SampleState.SCORED, SampleState.FAILED)
        return (
            f"the evaluation of weight version {self.ledger.iteration}: "
            f"{self.ledger.count(*FINISHED)} of {len(self.ledger.samples)} responses, {judged} judged"
        )


def best(results: Iterable[EvaluationResult]) -> EvaluationResult | None:
    """Return the result of the highest mean reward, the earliest of equal ones; None when none has a reward."""
    judged = [result for result in results if "reward" in result.metrics]
    return max(judged, key=lambda result: (result.metrics["reward"], -result.version), default=None)


def latest_metrics(results: Sequence[EvaluationResult]) -> dict[str, float]:
    """Return the metrics of the last evaluation, and of the best one so far; empty before the first."""
    if not results:
        return {}
    metrics = {f"evaluation/{name}": value for name, value in results[-1].metrics.items()}
    if (top := best(results)) is not None:
        metrics |= {"evaluation/best_reward": top.metrics["reward"], "evaluation/best_version": float(top.version)}
    return metrics


def reported_at(results: Sequence[EvaluationResult], version: int) -> dict[str, float]:
    """Return the metrics that are reported of the evaluation of a version; empty when it has none."""
    known = [result for result in results if result.version <= version]
    return latest_metrics(known) if known and known[-1].version == version else {}


def evaluation_tasks(graph: Graph) -> tuple[Task, ...]:
    """Return the tasks that judge a single response; empty where an algorithm has none."""
    return tuple(task for task in graph.tasks if task.rewards and task.scope is Scope.SAMPLE)
