"""The state of evaluations: the samples of the current one in a separate ledger, and earlier results.

In messages, a sample of an evaluation is named by (weight version, FIRST_SAMPLE + its index). Rule: plain data.
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
    """The result of one evaluation."""

    version: int
    metrics: Mapping[str, float]
    """Metrics by name, without the prefix `evaluation/`."""


@dataclass
class EvaluationState:
    """The evaluation in progress, and earlier ones. Times are seconds of the monotonic clock."""

    ledger: Ledger | None = None
    """Samples of the evaluated version, which is the ledger's iteration; None without an evaluation."""
    begun: float = 0.0
    ended: float = 0.0
    """Moment when it was noticed that all its responses are scored or failed; 0 before that."""
    waits_since: float = 0.0
    """Moment since which the iteration waits only for it; 0 while it does not."""
    waited: float = 0.0
    """Seconds of the waits for it that are over."""
    deferred: bool = False
    """Whether the next iteration evaluates its version because an evaluation was given up (`rounds.give_up`)."""
    before_training: bool = False
    """Whether its responses are decoded before training: ranks are colocated, and an iteration began with its
    version."""
    results: list[EvaluationResult] = field(default_factory=list)
    """Results of all evaluations of the run, in order."""

    @property
    def unfinished(self) -> bool:
        """Whether there is an evaluation with responses that are neither scored nor failed."""
        return self.ledger is not None and not self.ledger.all_scored

    @property
    def decodes(self) -> bool:
        """Whether there is an evaluation with responses that are still to be decoded."""
        return self.ledger is not None and not self.ledger.all_generated

    @property
    def holds_training(self) -> bool:
        """Whether the batch must not be trained before the evaluation is decoded."""
        return self.before_training and self.decodes

    def needs(self, worker: str) -> bool:
        """Return whether a worker decodes for the evaluation, or may, because responses are queued."""
        ledger = self.ledger
        if ledger is None or ledger.all_generated:
            return False
        return bool(ledger.decoding_on(worker) or ledger.queued(1) or ledger.isolated())

    def progress(self) -> str:
        """Describe the progress in words; empty when the evaluation is finished, or there is none."""
        if self.ledger is None or not self.unfinished:
            return ""
        judged = self.ledger.count(SampleState.SCORED, SampleState.FAILED)
        return (
            f"the evaluation of weight version {self.ledger.iteration}: "
            f"{self.ledger.count(*FINISHED)} of {len(self.ledger.samples)} responses, {judged} judged"
        )


def best(results: Iterable[EvaluationResult]) -> EvaluationResult | None:
    """Return the result with the highest mean reward, the earliest of equal ones; None when none has a reward."""
    judged = [result for result in results if "reward" in result.metrics]
    return max(judged, key=lambda result: (result.metrics["reward"], -result.version), default=None)


def latest_metrics(results: Sequence[EvaluationResult]) -> dict[str, float]:
    """Return the metrics of the last evaluation, and reward and version of the best one; empty before the first."""
    if not results:
        return {}
    metrics = {f"evaluation/{name}": value for name, value in results[-1].metrics.items()}
    if (top := best(results)) is not None:
        metrics |= {"evaluation/best_reward": top.metrics["reward"], "evaluation/best_version": float(top.version)}
    return metrics


def reported_at(results: Sequence[EvaluationResult], version: int) -> dict[str, float]:
    """Return the metrics for the evaluation of a version, with the best one up to it; empty when it has none."""
    past_results = [result for result in results if result.version <= version]
    return latest_metrics(past_results) if past_results and past_results[-1].version == version else {}


def evaluation_tasks(graph: Graph) -> tuple[Task, ...]:
    """Return the tasks that judge a single response; empty where the graph has none."""
    return tuple(task for task in graph.tasks if task.rewards and task.scope is Scope.SAMPLE)
