"""A discrete-event simulation of one iteration on devices whose pace the planner does not know.

`plan_regret` uses it. It simulates every decode step of every worker, the scoring of every sample, and every forward
and backward pass of every stage and micro-batch, each with jitter.
Rule: `HiddenPace` alone knows how long work takes. `measured_costs` times single operations, as a worker and a rank can
at the start of a job; it never shows the functions themselves.
"""

import heapq
import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from rlhf_api.job.groups import TrainingParallelism
from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.fitted_costs import Floats, StepTime
from rlhf_planner.plan_search.cost_figures import (
    CostFigure,
    EngineProfile,
    FigureSource,
    LayerProfile,
    LinkCosts,
    PlanCosts,
)
from rlhf_planner.plan_search.device_plan import CriticOverlap, Placement
from rlhf_planner.plan_search.iteration_forecast import RolloutHalf
from rlhf_planner.plan_search.training_seconds import TrainingSettings
from rlhf_planner.plan_search.workload import ModelFacts, Workload

JITTER: Final = 0.03
"""Standard deviation of the logarithm of an operation's time."""
NODE: Final = 4
"""Devices of a node."""
SCORED: Final = 16
"""Samples of a scoring pass."""
HIDDEN_SUMS: Final = 0.35
"""Share of the gradients' sums that hides behind the backward pass."""


@dataclass(frozen=True)
class HiddenPace:
    """Seconds of operations, by functions that the cost model does not have."""

    link_bytes: float
    """Bytes per second of a link in a node; a quarter of it between nodes."""

    def decode(self, model: ModelFacts, rows: int, keys: float, tensor: int) -> float:
        """Return the seconds of one decode step of `rows` samples with `keys` keys in total."""
        work = model.size.parameters * (1.2e-9 + 4e-11 * math.pow(rows, 0.85)) + 2.5e-8 * math.pow(keys, 0.97)
        sums = self.ring(rows * model.hidden * 4, tensor, tensor)
        return 4e-4 + work / math.pow(tensor, 0.8) + 2 * model.layers * sums * (1 + 0.1 * math.log2(tensor))

    def score(self, models: tuple[ModelFacts, ...], tokens: float) -> float:
        """Return the seconds of a scoring pass over so many tokens by all models."""
        return sum(6e-4 + 1.6e-11 * model.size.parameters * math.pow(tokens, 0.98) for model in models)

    def layer(self, model: ModelFacts, tokens: float, tensor: int) -> float:
        """Return the seconds of one layer, forward and backward, without communication."""
        work = 5.2e-11 * model.layer_parameters * math.pow(tokens, 0.96) / math.pow(tensor, 0.9)
        return work + 1.1e-4 * (1 + 0.3 * math.exp(-tokens / 200))

    def message(self, count: float, span: int) -> float:
        """Return the seconds of a message of `count` bytes between ranks that span so many devices."""
        bandwidth = self.link_bytes / (1 if span <= NODE else 4)
        return 3e-5 + (count / bandwidth) * (1 + 0.04 * math.log2(max(1, span)))

    def ring(self, count: float, ranks: int, span: int) -> float:
        """Return the seconds of a sum over ranks."""
        return 0.0 if ranks < 2 else 2 * (ranks - 1) * self.message(count / ranks, span)

    def optimizer(self, parameters: float) -> float:
        """Return the seconds of an optimizer step."""
        return 5e-4 + 1.4e-9 * parameters

    def host(self, count: float) -> float:
        """Return the seconds of a copy between device and host memory."""
        return 1e-3 + count / 1.5e9


def measured_costs(pace: HiddenPace, workload: Workload) -> PlanCosts:
    """Return the costs that a job measures on these devices at its start."""
    policy, measured = workload.policy, FigureSource.MEASURED
    layers = []
    for role in workload.trained:
        model = workload.model(role)
        for tensor in (1, 2):
            points = tuple((float(n), pace.layer(model, n, tensor)) for n in (64, 256, 1024, 4096))
            layers.append(LayerProfile(str(role), tensor, points, measured))
    decoded = [
        StepTime(rows, keys, pace.decode(policy, rows, rows * keys, 1)) for rows in (1, 8, 32) for keys in (32, 256)
    ]
    scored = [
        StepTime(rows, tokens, pace.score(workload.scorers, rows * tokens)) for rows in (1, 16) for tokens in (64, 256)
    ]
    filled = [StepTime(rows, 32, pace.score((policy,), rows * 32.0)) for rows in (1, 8, 32)]
    stage = StageCosts.measured(
        decode=decoded, max_batch_size=workload.spec.generation.max_batch_size, prefill=filled,
        tasks={"all": scored}, score_batch=SCORED, padded=False,
    )  # fmt: skip
    many = 4096.0
    flops = 6 * policy.layer_parameters * many / pace.layer(policy, many, 1)
    figure = CostFigure
    return PlanCosts(
        device_name="simulated device",
        memory_bandwidth=figure(28e8 / pace.optimizer(1e8), measured),
        flops=figure(flops, measured),
        layer_seconds=figure(pace.layer(policy, 1, 1) / 3, measured),
        host_bandwidth=figure(1e8 / pace.host(1e8), measured),
        inside=_link(pace, 2),
        between=_link(pace, NODE + 1),
        devices_per_node=figure(NODE, measured),
        layers=tuple(layers),
        engine=EngineProfile(stage, 1, measured),
    )


def _link(pace: HiddenPace, span: int) -> LinkCosts:
    """Return bandwidth and latency of a link from two messages."""
    small, large = pace.message(0, span), pace.message(4e6, span)
    source = FigureSource.MEASURED
    return LinkCosts(CostFigure(4e6 / (large - small), source), CostFigure(small, source))


class SimulatedJob:
    """Iterations of one workload. Halves are simulated once per seed."""

    def __init__(self, pace: HiddenPace, workload: Workload) -> None:
        self._pace, self._workload = pace, workload
        self._rollouts: dict[tuple[int, int, int, int, int], tuple[list[float], Floats, float]] = {}
        self._trainings: dict[tuple[int, str, int], dict[str, float]] = {}
        late = {str(role) for role in workload.trained[1:]}
        sizes = {model.role: model.size.parameters for model in workload.scorers}
        self._late = sum(size for role, size in sizes.items() if role in late) / max(1, sum(sizes.values()))

    def seconds(
        self, placement: Placement, rollout: RolloutHalf, settings: TrainingSettings, overlap: CriticOverlap, seed: int
    ) -> float:
        """Return the seconds of one iteration; Enabled and Auto take the faster way."""
        finished, costs, released = self._rollout(rollout, seed)
        parts = self._training(settings, seed)
        train, policy = sum(parts.values()), parts[str(self._workload.trained[0])]
        publish = self._publish(placement, rollout, settings)
        scorers = [0.0] * rollout.inference_workers or [released] * rollout.generation_workers
        end = max(max(finished), _scored([(at, cost) for at, cost in zip(finished, costs, strict=True)], scorers))
        together = end + train + publish
        if placement == "Colocated":
            return together + self._moves(settings)
        if overlap == "Disabled":
            return together
        ready = train - policy + publish
        work = [(at, cost * (1 - self._late)) for at, cost in zip(finished, costs, strict=True)]
        work += [(max(at, ready), cost * self._late) for at, cost in zip(finished, costs, strict=True)]
        apart = policy + publish + max(ready, max(finished), _scored(work, scorers))
        return min(together, apart)

    def _rollout(self, half: RolloutHalf, seed: int) -> tuple[list[float], Floats, float]:
        """Return (when each sample is finished, its seconds of scoring, when the last worker is released)."""
        key = (seed, half.generation_workers, half.inference_workers, half.engine_tensor, half.max_batch_size)
        if key not in self._rollouts:
            self._rollouts[key] = self._decoded(half, np.random.default_rng((seed, 7)))
        return self._rollouts[key]

    def _decoded(self, half: RolloutHalf, randomness: np.random.Generator) -> tuple[list[float], Floats, float]:
        workload, pace = self._workload, self._pace
        lengths = workload.lengths.draw(randomness, workload.prompts).tolist()
        finished = [0.0] * len(lengths)
        waiting = list(range(len(lengths)))[::-1]
        rows: list[dict[int, int]] = [{} for _ in range(half.generation_workers)]
        events = [(0.0, worker) for worker in range(half.generation_workers)]
        while events:
            now, worker = heapq.heappop(events)
            mine = rows[worker]
            share = min(half.max_batch_size, -(-len(lengths) // half.generation_workers))
            while waiting and len(mine) < share:
                mine[waiting.pop()] = 0
                now += pace.score((workload.policy,), 32.0)
            if not mine:
                continue
            keys = sum(32 + done for done in mine.values())
            step = pace.decode(workload.policy, len(mine), keys, half.engine_tensor)
            now += step * randomness.lognormal(0, JITTER)
            for sample in list(mine):
                mine[sample] += 1
                if mine[sample] >= lengths[sample]:
                    finished[sample] = now
                    del mine[sample]
            heapq.heappush(events, (now, worker))
        tokens = [32.0 + length for length in lengths]
        one_pass = [pace.score(workload.scorers, SCORED * count) / SCORED for count in tokens]
        return finished, np.array(one_pass) * randomness.lognormal(0, JITTER, len(tokens)), max(finished)

    def _training(self, settings: TrainingSettings, seed: int) -> dict[str, float]:
        key = (seed, settings.parallelism.model_dump_json(), settings.micro_batch_size)
        if key not in self._trainings:
            randomness = np.random.default_rng((seed, 11))
            lengths = np.asarray(self._workload.prompts, dtype=np.float64)
            lengths += self._workload.lengths.draw(randomness, self._workload.prompts)
            self._trainings[key] = {
                str(role): self._model_steps(self._workload.model(role), settings, lengths, randomness)
                for role in self._workload.trained
            }
        return self._trainings[key]

    def _model_steps(
        self, model: ModelFacts, settings: TrainingSettings, lengths: Floats, randomness: np.random.Generator
    ) -> float:
        """Return the seconds of all mini-batches of one model."""
        parallelism, mini = settings.parallelism, self._workload.spec.algorithm.fields.mini_batch_size
        total = 0.0
        for start in range(0, len(lengths), mini):
            batch = lengths[start : start + mini]
            slowest = 0.0
            for copy in range(parallelism.data):
                mine = batch[copy :: parallelism.data]
                sizes = [
                    mine[at : at + settings.micro_batch_size] for at in range(0, len(mine), settings.micro_batch_size)
                ]
                tokens = [float(part.max() * len(part)) for part in sizes]
                slowest = max(slowest, self._pipeline(model, parallelism, tokens, randomness))
            total += slowest + self._step(model, parallelism)
        return total

    def _pipeline(
        self, model: ModelFacts, parallelism: TrainingParallelism, tokens: list[float], randomness: np.random.Generator
    ) -> float:
        """Return the seconds of 1F1B over the stages of one copy."""
        stages, tensor, pace = parallelism.pipeline, parallelism.tensor, self._pace
        width, count = self._workload.value_bytes, len(tokens)
        work = np.zeros((stages, count))
        for batch, size in enumerate(tokens):
            layer = pace.layer(model, size, tensor)
            layer += 4 * pace.ring(size * model.hidden * width, tensor, tensor)
            for stage in range(stages):
                own = model.layers // stages + (stage < model.layers % stages)
                work[stage, batch] = own * layer
        work *= randomness.lognormal(0, JITTER, work.shape)
        edge = [pace.message(size * model.hidden * width, stages * tensor) if stages > 1 else 0.0 for size in tokens]
        return _one_f_one_b(work / 3, work * 2 / 3, edge)

    def _step(self, model: ModelFacts, parallelism: TrainingParallelism) -> float:
        """Return the seconds after the last backward pass of a mini-batch."""
        stage = model.size.parameters / (parallelism.pipeline * parallelism.tensor)
        copies, span = parallelism.data, parallelism.ranks
        seconds = (1 - HIDDEN_SUMS) * self._pace.ring(4 * stage, copies, span)
        if parallelism.shard_optimizer:
            seconds += self._pace.ring(4 * stage, copies, span) / 2
            stage /= copies
        return seconds + self._pace.optimizer(stage)

    def _publish(self, placement: Placement, rollout: RolloutHalf, settings: TrainingSettings) -> float:
        """Return the seconds until every worker has its weights: each holder serves its readers in turn."""
        workload, width = self._workload, self._workload.value_bytes
        devices = rollout.generation_workers * rollout.engine_tensor + rollout.inference_workers
        devices += settings.parallelism.ranks if placement == "Dedicated" else 0
        late = {str(role) for role in workload.trained[1:]}
        scored = sum(model.size.parameters for model in workload.scorers if model.role in late) * width
        own = workload.policy.size.parameters * width + (0 if rollout.inference_workers else scored)
        holders = settings.parallelism.keepers
        sent = rollout.generation_workers * own + rollout.inference_workers * scored
        return self._pace.message(sent / holders, devices) + self._pace.host(own / rollout.engine_tensor)

    def _moves(self, settings: TrainingSettings) -> float:
        workload = self._workload
        rank = sum(workload.model(role).size.parameters for role in workload.trained) / settings.parallelism.keepers
        return 4 * self._pace.host((12 * rank + workload.policy.size.parameters * workload.value_bytes) / 2)


def _scored(work: list[tuple[float, float]], scorers: list[float]) -> float:
    """Return when all (arrival, seconds) are scored, first come, first served, by scorers that join at these times."""
    free = list(scorers)
    heapq.heapify(free)
    end = 0.0
    for arrival, seconds in sorted(work):
        start = max(arrival, heapq.heappop(free))
        heapq.heappush(free, start + seconds)
        end = max(end, start + seconds)
    return end


def _one_f_one_b(forward: Floats, backward: Floats, edge: list[float]) -> float:
    """Return the makespan of 1F1B; `forward` and `backward` are [stages, micro-batches], `edge` [micro-batches]."""
    stages, count = forward.shape
    orders = []
    for stage in range(stages):
        ahead = min(count, stages - stage - 1)
        order = [("f", batch) for batch in range(ahead)]
        for batch in range(count):
            order += [("f", batch + ahead)] * (batch + ahead < count) + [("b", batch)]
        orders.append(order)
    done: dict[tuple[str, int, int], float] = {}
    clocks, at = [0.0] * stages, [0] * stages
    while any(place < len(order) for place, order in zip(at, orders, strict=True)):
        for stage in range(stages):
            while at[stage] < len(orders[stage]):
                kind, batch = orders[stage][at[stage]]
                source = stage - 1 if kind == "f" else stage + 1
                ready = 0.0
                if 0 <= source < stages:
                    if (kind, source, batch) not in done:
                        break
                    ready = done[kind, source, batch] + edge[batch]
                work = forward if kind == "f" else backward
                clocks[stage] = max(clocks[stage], ready) + float(work[stage, batch])
                done[kind, stage, batch] = clocks[stage]
                at[stage] += 1
    return max(clocks)
