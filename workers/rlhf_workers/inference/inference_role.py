"""The inference role: scores samples with the models and rewards of its tasks.

Rule: a (sample, task) of a successful Score command gets one ScoredSample (a result, abstained, or a failure), unless
`give_back` drops it. A model whose update was interrupted gives no score until a complete version is loaded.
"""

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import torch

from rlhf_api.algorithms import Scope, graph_of
from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack
from rlhf_common.names import Group
from rlhf_common.samples import FloatArray, ScoringSample
from rlhf_workers.failures import WorkError, failure_of
from rlhf_workers.inference.batches import next_batch
from rlhf_workers.inference.group_comparisons import GroupComparisons, GroupScorer
from rlhf_workers.inference.incremental_scoring import IncrementalScoring, prefix_budget
from rlhf_workers.inference.model_scorer import ModelScorer, TokenScorer, ValueScorer
from rlhf_workers.inference.rewards.reward_calls import SPAN_TASK, RewardCalls
from rlhf_workers.inference.scorers import Scorer, Trunks, load_scorer
from rlhf_workers.inference.scoring_costs import measure
from rlhf_workers.models.loading import copy_weights, matched_weights
from rlhf_workers.sample_codec import key_message, scoring_sample_of
from rlhf_workers.shared_memory.choice import borrowed_by
from rlhf_workers.weights.adapters import AdapterWeights, WeightFetcher
from rlhf_workers.weights.fetching import fetch_weights
from rlhf_workers.weights.offload import OffloadableWeights
from rlhf_workers.worker_role import NO_VERSION, Outbox

log = logging.getLogger(__name__)

CPU: Final = torch.device("cpu")


@dataclass
class _Task:
    """One task of the graph on this worker."""

    name: str
    model: str
    scorer: Scorer
    weights: OffloadableWeights | None
    """Weights that move between host and device; None if none do."""
    of_group: bool = False
    """Whether its unit is a prompt group: all samples of a command are judged together."""
    waiting: deque[ScoringSample] = field(default_factory=deque)


class InferenceRole:
    """Scores samples; see `worker_role.WorkerRole`."""

    name = "inference"
    handles = frozenset({"score", "score_prefix", "load_weights", "measure", "offload"})

    def __init__(
        self,
        batch_tokens: int,
        certificates: Path | None,
        longest: int = 0,
        device: torch.device = CPU,
        weight_fetcher: WeightFetcher = fetch_weights,
    ) -> None:
        """`batch_tokens` 0 scores samples one by one (deterministic job); `longest`: maximum tokens of a sample."""
        self._tasks: dict[str, _Task] = {}
        self._batch_tokens = batch_tokens
        self._certificates = certificates
        self._longest = longest
        self._versions: dict[str, int] = {}
        self._measuring: Iterator[pb.CommandDone | None] | None = None
        self._device = device
        self._weight_fetcher = weight_fetcher
        self._early: IncrementalScoring | None = None
        self._comparisons = GroupComparisons()

    def add(
        self,
        name: str,
        model: str,
        scorer: Scorer,
        weights: OffloadableWeights | None = None,
        *,
        of_group: bool = False,
    ) -> None:
        """Add a task; a trained model starts at version 0, the manifest's folder.

        Raises WorkError if the task's unit is a prompt group and the scorer judges single samples.
        """
        calls = isinstance(scorer, RewardCalls) and scorer.judges_groups
        if of_group and not (calls or isinstance(scorer, GroupScorer)):
            message = f"task {name} judges the responses to a prompt together, and its source judges each alone"
            raise WorkError("WrongRole", message, field=f"spec.models.{model}")
        self._tasks[name] = _Task(name, model, scorer, weights, of_group)
        if isinstance(scorer, ValueScorer):
            self._versions[model] = 0

    def handle(self, command: pb.Command, outbox: Outbox) -> None:
        """Take a command: score samples or unfinished ones, load weights, offload, or measure."""
        match command.WhichOneof("command"):
            case "load_weights":
                result = self.load(command.load_weights, outbox)
                outbox.done(pb.CommandDone(command_id=command.id, load=result))
            case "measure":
                self._measuring = self._measure(command)
            case "offload":
                if not self.active():
                    self._offload()
                outbox.done(pb.CommandDone(command_id=command.id))
            case "score_prefix":
                self._begin_early(command.score_prefix)
                outbox.done(pb.CommandDone(command_id=command.id))
            case _:
                self._score_all(command, outbox)

    def _score_all(self, command: pb.Command, outbox: Outbox) -> None:
        asked = {task for sample in command.score.samples for task in sample.tasks}
        if unknown := asked - self._tasks.keys():
            tasks = ", ".join(self._tasks)
            message = f"asked for task {', '.join(sorted(unknown))} on a worker that runs {tasks}"
            raise WorkError("WrongRole", message, retryable=True)
        self._require_versions(self._tasks[task].model for task in asked)
        self._onload()
        malformed: dict[str, pb.Failure] = {}
        for sample in command.score.samples:
            self._take(sample, outbox, malformed)
        for task in self._tasks.values():
            if task.of_group and task.waiting:
                self._judge_group(task, malformed.get(task.name), outbox)
        outbox.done(pb.CommandDone(command_id=command.id))

    def load(self, weights: pb.LoadWeights, outbox: Outbox | None) -> pb.LoadResult:
        """Fetch a version of a trained model and replace its weights; do nothing if version 0 is wanted and is here.

        An error before the first copy leaves the earlier version, a later one NO_VERSION.
        """
        scorers = [task.scorer for task in self._tasks.values() if task.model == weights.model]
        if not scorers or not isinstance(scorers[0], ValueScorer):
            message = f"asked to load {weights.model}, but this worker scores with {', '.join(self._models())}"
            raise WorkError("WrongRole", message, retryable=True)
        if weights.version == 0 == self._versions[weights.model]:
            return pb.LoadResult(version=0)
        start_ns, started = time.time_ns(), time.monotonic()
        with self._weight_fetcher(weights.model, weights.version, weights.sources, self._certificates) as source:
            came = time.monotonic()
            subject = f"{weights.model} version {weights.version}"
            copies = matched_weights(scorers[0].model, source.tensors, subject=subject)
            self._versions[weights.model] = NO_VERSION
            size = copy_weights(copies)
            source.confirm()
        ended = time.monotonic()
        seconds = ended - started
        for task in self._tasks.values():
            if task.model == weights.model and self._early is not None:
                self._early.drop_task(task.name)
        self._versions[weights.model] = weights.version
        if outbox is not None:
            attributes = {"model": weights.model, "bytes": str(size), "way": source.ways}
            outbox.span("load-weights", start_ns, time.time_ns(), weights.version, **attributes)
            for way, count in source.bytes_by_way.items():
                outbox.moved(f"weights_{way}", count, seconds)
        return pb.LoadResult(version=weights.version, bytes=size, seconds=seconds, copy_seconds=ended - came)

    def step(self, outbox: Outbox) -> bool:
        """Report finished rewards, and run a part of a measurement or score one batch of the task with most waiting
        samples.
        """
        worked = self.report(outbox)
        if self._measuring is not None:
            done = next(self._measuring)
            if done is not None:
                self._measuring = None
                outbox.done(done)
            return True
        waiting = [task for task in self._tasks.values() if task.waiting and self._has_version(task.model)]
        if not waiting:
            compared = self._comparisons.step(outbox)
            return compared or (self._early is not None and self._early.step(outbox, self._is_ready)) or worked
        task = max(waiting, key=lambda task: len(task.waiting))
        assert not isinstance(task.scorer, RewardCalls | GroupScorer)
        batch = next_batch(task.waiting, self._batch_tokens)
        start_ns = time.time_ns()
        begun = self._score(task, task.scorer, batch, outbox)
        rest = sum(sample.length for sample in batch) - begun
        end_ns, iteration = time.time_ns(), batch[0].key.iteration
        attributes = {"samples": str(len(batch)), "tokens": str(rest)}
        outbox.span(SPAN_TASK.format(task=task.name), start_ns, end_ns, iteration, **attributes)
        scoring = pb.ScoringObservation(task=task.name, samples=len(batch), tokens=rest)
        outbox.observe(pb.Observation(start_ns=start_ns, end_ns=end_ns, iteration=iteration, scoring=scoring))
        outbox.count(rest)
        return True

    def report(self, outbox: Outbox) -> bool:
        """Report finished rewards; compute nothing."""
        worked = False
        for task in self._tasks.values():
            if isinstance(task.scorer, RewardCalls):
                worked = task.scorer.report(task.name, outbox) or worked
        return worked

    def give_back(self) -> list[pb.SampleProgress]:
        """Drop the samples whose scores are not reported; there are no tokens to return."""
        if self._early is not None:
            self._early.clear()
        self._comparisons.clear()
        for task in self._tasks.values():
            task.waiting.clear()
            if isinstance(task.scorer, RewardCalls):
                task.scorer.forget()
        return []

    def versions(self) -> Mapping[str, int]:
        """Return the versions of its trained models (critics)."""
        return dict(self._versions)

    def active(self) -> int:
        """Return the number of scores not yet reported."""
        calls = [task.scorer.pending for task in self._tasks.values() if isinstance(task.scorer, RewardCalls)]
        waiting = sum(len(task.waiting) for task in self._tasks.values())
        return sum(calls) + waiting + self._comparisons.pending

    @property
    def loads_while_offloaded(self) -> bool:
        """Whether it has models and all are in host memory; see LoadsWhileOffloaded."""
        offloadable = [task.weights for task in self._tasks.values() if task.weights is not None]
        return bool(offloadable) and all(weights.offloaded for weights in offloadable)

    def offload(self) -> None:
        """See WorkerRole; reward processes continue."""
        self._offload()

    def close(self) -> None:
        """End reward processes and connections."""
        for task in self._tasks.values():
            if isinstance(task.scorer, RewardCalls):
                task.scorer.close()

    # ------------------------------------------------------------ parts

    def _onload(self) -> float:
        """Move all models to the device; return the seconds."""
        started = time.monotonic()
        for task in self._tasks.values():
            if task.weights is not None:
                task.weights.onload()
        return time.monotonic() - started

    def _offload(self) -> None:
        if self._early is not None:
            self._early.clear()
        for task in self._tasks.values():
            if task.weights is not None:
                task.weights.offload()

    def _measure(self, command: pb.Command) -> Iterator[pb.CommandDone | None]:
        """Yield None during the measurement, then the answer.

        If a model was offloaded, all are offloaded afterwards, unless scores are pending.
        """
        offloaded = any(task.weights is not None and task.weights.offloaded for task in self._tasks.values())
        onload_seconds = self._onload()
        tasks = self._tasks.values()
        scorers = {task.name: task.scorer for task in tasks if not isinstance(task.scorer, RewardCalls | GroupScorer)}
        costs = yield from measure(scorers, self._longest, self._batch_tokens)
        if offloaded and not self.active():
            self._offload()
        result = pb.MeasureResult(
            measurement_id=command.measure.measurement_id,
            scoring=pb.ScoringCosts(tasks=costs, onload_seconds=onload_seconds),
        )
        yield pb.CommandDone(command_id=command.id, measure=result)

    def _begin_early(self, command: pb.ScorePrefix) -> None:
        self._onload()
        if self._early is None:
            scorers = {name: task.scorer for name, task in self._tasks.items() if isinstance(task.scorer, TokenScorer)}
            self._early = IncrementalScoring(scorers, self._batch_tokens, prefix_budget(self._device))
        for sample in command.samples:
            self._early.ask(sample)

    def _has_version(self, model: str) -> bool:
        return self._versions.get(model) != NO_VERSION

    def _is_ready(self, task: str) -> bool:
        return self._has_version(self._tasks[task].model)

    def _require_versions(self, models: Iterable[str]) -> None:
        """Raise a retryable WorkError if the last update of one of the models was interrupted."""
        torn = sorted({model for model in models if not self._has_version(model)})
        if torn:
            message = f"the last update of the weights of {', '.join(torn)} was interrupted; it must be loaded again"
            raise WorkError("NotReady", message, retryable=True)

    def _models(self) -> list[str]:
        return [task.model for task in self._tasks.values()]

    def _take(self, message: pb.ScoreSample, outbox: Outbox, malformed: dict[str, pb.Failure]) -> None:
        """Queue a sample; report a malformed one as failed, and add its failure to `malformed` by task."""
        try:
            sample = scoring_sample_of(message)
        except WorkError as error:
            for name in message.tasks:
                outbox.scored(pb.ScoredSample(key=message.key, task=name, failure=error.failure))
                malformed.setdefault(name, error.failure)
            return
        for name in message.tasks:
            task = self._tasks[name]
            if isinstance(task.scorer, RewardCalls) and not task.of_group:
                task.scorer.submit(sample)
            else:
                task.waiting.append(sample)

    def _judge_group(self, task: _Task, failure: pb.Failure | None, outbox: Outbox) -> None:
        """Have the waiting samples judged together; if one of their group failed, all fail with it."""
        samples = list(task.waiting)
        task.waiting.clear()
        if failure is not None:
            for sample in samples:
                outbox.scored(pb.ScoredSample(key=key_message(sample.key), task=task.name, failure=failure))
        elif isinstance(task.scorer, GroupScorer):
            self._comparisons.submit(task.name, task.scorer, samples)
        else:
            assert isinstance(task.scorer, RewardCalls)
            task.scorer.submit_group(samples)

    def _score(self, task: _Task, scorer: ModelScorer, batch: list[ScoringSample], outbox: Outbox) -> int:
        """Score one batch; if it fails, score each sample alone, so that one bad sample fails no other.

        Return the number of tokens that were scored early.
        """
        try:
            scores, early = self._scores(task, scorer, batch)
        except Exception as error:
            if len(batch) == 1:
                log.error("task %s: %s", task.name, error, exc_info=None if isinstance(error, WorkError) else error)
                failure = failure_of(error, "score")
                outbox.scored(pb.ScoredSample(key=key_message(batch[0].key), task=task.name, failure=failure))
                return 0
            log.warning("task %s failed on %d samples (%s); scoring each alone", task.name, len(batch), error)
            return sum(self._score(task, scorer, [sample], outbox) for sample in batch)
        for sample, result, tokens in zip(batch, scores, early, strict=True):
            outbox.scored(
                pb.ScoredSample(key=key_message(sample.key), task=task.name, result=pack(result), early_tokens=tokens)
            )
        return sum(early)

    def _scores(
        self, task: _Task, scorer: ModelScorer, batch: list[ScoringSample]
    ) -> tuple[list[FloatArray], list[int]]:
        """Return the results of a batch, and how many tokens of each sample were scored early."""
        if self._early is None or not isinstance(scorer, TokenScorer):
            return scorer.score(batch), [0] * len(batch)
        begun = [self._early.take(task.name, sample) for sample in batch]
        early = [0 if prefix is None else prefix.positions for prefix in begun]
        rest = [sample for sample, prefix in zip(batch, begun, strict=True) if prefix is None]
        pairs = [(sample, prefix) for sample, prefix in zip(batch, begun, strict=True) if prefix is not None]
        finished = iter(scorer.finish([sample for sample, _ in pairs], [prefix for _, prefix in pairs]))
        whole = iter(scorer.score(rest) if rest else [])
        return [next(whole if prefix is None else finished) for prefix in begun], early


def build(job: RLHFJob, command: pb.Command, device: torch.device, certificates: Path | None) -> InferenceRole:
    """Return the role of a BecomeInference command, with models loaded and reward sources running."""
    become = command.become_inference
    graph = {task.name: task for task in graph_of(job.spec).tasks_of(Group.INFERENCE)}
    unknown = set(become.tasks) - graph.keys()
    if unknown:
        message = f"asked for {', '.join(sorted(unknown))}; {job.spec.algorithm.name} has {', '.join(graph)}"
        raise WorkError("WrongRole", message)
    batch_tokens = 0 if job.spec.deterministic else job.spec.inference.batch_tokens
    rollout = job.spec.rollout
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    fetch = partial(fetch_weights, sharings=borrowed_by(job.spec, device), path_field=job.spec.models.path_field)
    weight_fetcher = AdapterWeights(job.spec, fetch)
    role = InferenceRole(batch_tokens, certificates, longest, device, weight_fetcher)
    trunks: Trunks = {}
    moved: set[int] = set()
    try:
        for name in become.tasks:
            scorer = load_scorer(graph[name], job.spec, device, offloaded=become.offloaded, trunks=trunks)
            weights = None
            if not isinstance(scorer, RewardCalls):
                weights = OffloadableWeights(scorer.model, device, frozen=scorer.frozen, apart=frozenset(moved))
                moved |= {id(part) for part in (*scorer.model.parameters(), *scorer.model.buffers())}
            role.add(name, graph[name].model, scorer, weights, of_group=graph[name].scope is Scope.GROUP)
        for trained in become.weights:
            role.load(trained, None)
    except BaseException:
        role.close()
        raise
    return role
