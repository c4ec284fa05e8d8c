"""Training ranks as threads of one process, joined by queues, over real stages of tiny Hugging Face folders."""

import json
import queue
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch._C._distributed_c10d import HashStore

from rlhf_api.algorithms import ALGORITHMS, ModelRole, SampleField, full_graph
from rlhf_api.algorithms.graph import SAMPLED_FIELD
from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack
from rlhf_common.schedule import Action, Pipeline, ScheduleTable
from rlhf_planner.schedule.methods import placed
from rlhf_planner.schedule.serial import serial_table
from rlhf_workers.algorithms.registry import build_algorithm
from rlhf_workers.training.backends import megatron_backend, torch_backend
from rlhf_workers.training.backends.torch_backend import build_trainer
from rlhf_workers.training.batches.training_batch import TrainingBatch, batch_from
from rlhf_workers.training.checkpoints import checkpoint
from rlhf_workers.training.communication.communicator import Communicator, RowCounts
from rlhf_workers.training.communication.transport import GroupTransport
from rlhf_workers.training.parallel.rank_layout import RankLayout
from rlhf_workers.training.trainer import Trainer

Result = TypeVar("Result")
WAIT = 300.0
"""Seconds for one wait."""
CPU = torch.device("cpu")
STAGES = {"torch": torch_backend.load_stage, "megatron": megatron_backend.load_stage}
"""Backend -> function that loads a stage."""
TWO_EPOCHS = {"ppo": {"miniBatchSize": 4, "epochs": 2, "klTarget": 2.0, "klHorizon": 50}}


class ThreadHub:
    """State shared by the threads: one queue per ordered pair of ranks, and meeting points for sums."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, int], queue.Queue[torch.Tensor]] = {}
        self.changed = threading.Condition()
        self.meetings: dict[Any, dict[int, torch.Tensor]] = defaultdict(dict)
        self.log: list[tuple[int, str]] = []

    def queue(self, sender: int, receiver: int) -> "queue.Queue[torch.Tensor]":
        """Return the queue of a pair. The lock prevents that two are created at once, of which one would be lost."""
        with self.changed:
            return self._queues.setdefault((sender, receiver), queue.Queue())


class ThreadCommunicator:
    """`Peers` of one thread; sums are added in rank order, so they have the same bits everywhere."""

    transport = GroupTransport("gloo")

    def __init__(self, hub: ThreadHub, rank: int) -> None:
        self.hub, self.rank = hub, rank
        self._met: dict[tuple[int, ...], int] = defaultdict(int)
        self._posted: dict[int, deque[torch.Tensor]] = defaultdict(deque)

    def send(self, tensor: torch.Tensor, peer: int) -> "Done":
        self.hub.queue(self.rank, peer).put(tensor.clone())
        return Done(lambda: None)

    def receive(self, tensor: torch.Tensor, peer: int) -> "Done":
        source, posted = self.hub.queue(peer, self.rank), self._posted[peer]
        posted.append(tensor)

        def wait() -> None:  # the k-th send meets the k-th receive, in any order of waiting
            while any(other is tensor for other in posted):
                posted.popleft().copy_(source.get(timeout=WAIT))

        return Done(wait)

    def all_reduce_sum(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        parts = self._meet(tensor, ranks)
        tensor.copy_(sum(parts[1:], parts[0]))

    def all_reduce_max(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        for part in self._meet(tensor, ranks):
            torch.maximum(tensor, part, out=tensor)

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, ranks: tuple[int, ...]) -> None:
        whole.copy_(torch.cat(self._meet(own, ranks)))

    def reduce_scatter_sum(self, own: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...]) -> None:
        parts = self._meet(whole, ranks)
        own.copy_(sum(parts[1:], parts[0]).chunk(len(ranks))[ranks.index(self.rank)])

    def broadcast(self, tensor: torch.Tensor, source: int, ranks: tuple[int, ...]) -> None:
        tensor.copy_(self._meet(tensor, ranks)[ranks.index(source)])

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, rows: RowCounts, ranks: tuple[int, ...]) -> None:
        assert len(received) == sum(rows.received)
        exchanged = zip(self._meet(sent, ranks), self._meet(torch.tensor(rows.sent), ranks), strict=True)
        own = ranks.index(self.rank)
        parts = [theirs.split(counts.tolist())[own] for theirs, counts in exchanged]
        assert [len(part) for part in parts] == list(rows.received)
        received.copy_(torch.cat(parts))

    def _meet(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> list[torch.Tensor]:
        self._met[ranks] += 1
        with self.hub.changed:
            meeting = self.hub.meetings[ranks, self._met[ranks]]
            meeting[self.rank] = tensor.clone()
            self.hub.changed.notify_all()
            assert self.hub.changed.wait_for(lambda: len(meeting) == len(ranks), WAIT), f"waited for {ranks}"
        return [meeting[rank] for rank in ranks]


class Done:
    """Handle of a transfer: a send is done at once, a receive at the latest when it is waited for."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self.wait = action

    def is_completed(self) -> bool:
        return False


def make_job(
    actor: Path, critic: Path | None = None, *, training: dict[str, Any] | None = None, **spec: Any
) -> RLHFJob:
    """Return a job with 8 samples per iteration in one mini-batch; `spec` replaces its fields."""
    models = {"actor": {"path": str(actor)}, "reward": {"function": {"module": "rewards"}}}
    if critic is not None:
        models["critic"] = {"path": str(critic)}
    optimizer = {"learningRate": 1e-2, "maxGradientNorm": 1.0}
    body = {
        "algorithm": {"ppo": {"miniBatchSize": 8}},
        "models": models,
        "prompts": {"path": "prompts.jsonl"},
        "rollout": {"batchSize": 8, "temperature": 0.8},
        "training": {"microBatchSize": 2, "optimizer": optimizer, **(training or {})},
        "iterations": 4,
        "seed": 5,
        "deterministic": True,
        **spec,
    }
    return RLHFJob.model_validate(
        {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "t"}, "spec": body}
    )


def serial(job: RLHFJob, pipeline: int, data: int, models: Sequence[str] = ("actor", "critic")) -> ScheduleTable:
    """Return the serial table of a job; `pipeline`: stages of the actor."""
    count = job.spec.algorithm.fields.mini_batch_size // (data * job.spec.training.micro_batch_size)
    return serial_table(placed(tensors_of(job, models), pipeline * job.spec.training.parallelism.tensor, count))


def tensors_of(job: RLHFJob, models: Sequence[str] = ("actor", "critic")) -> dict[str, int]:
    """Return model -> number of ranks that share a stage of it."""
    return {model: job.spec.training.parallelism.tensor_of(ModelRole(model)) for model in models}


def split_backward(table: ScheduleTable) -> ScheduleTable:
    """Split every backward: I at once and W as late as possible, after all other steps of the rank."""
    rows = []
    for row in table.rows:
        halves = [a.model_copy(update={"kind": "I"}) if a.kind == "B" else a for a in row]
        rows.append((*halves, *(a.model_copy(update={"kind": "W"}) for a in row if a.kind == "B")))
    return table.model_copy(update={"rows": tuple(rows), "method": "split"})


def interleave(pipelines: tuple[Pipeline, ...]) -> ScheduleTable:
    """Run all pipelines at once: micro-batch by micro-batch, one step of each pipeline in turn, with transfers in
    order.
    """
    rows: list[list[Action]] = [[] for _ in range(1 + max(r for p in pipelines for r in p.stage_ranks))]

    def act(kind: str, index: int, stage: int, microbatch: int, rank: int, peer: int | None = None) -> None:
        rows[rank].append(Action(kind=kind, pipeline=index, stage=stage, microbatch=microbatch, peer=peer))

    def steps(index: int, pipeline: Pipeline, m: int) -> list[tuple[str, int, int, int]]:
        order = range(len(pipeline.stage_ranks))
        return [("F", index, s, m) for s in order] + [("B", index, s, m) for s in reversed(order)]

    for m in range(max(p.microbatches for p in pipelines)):
        chains = [steps(i, p, m) for i, p in enumerate(pipelines) if m < p.microbatches]
        for turn in range(max(map(len, chains))):
            for kind, index, stage, microbatch in (chain[turn] for chain in chains if turn < len(chain)):
                ranks = pipelines[index].stage_ranks
                act(kind, index, stage, microbatch, ranks[stage])
                target = stage + 1 if kind == "F" else stage - 1
                if 0 <= target < len(ranks) and ranks[target] != ranks[stage]:
                    act(f"SEND_{kind}", index, stage, microbatch, ranks[stage], ranks[target])
                    act(f"RECV_{kind}", index, target, microbatch, ranks[target], ranks[stage])
    return ScheduleTable(method="interleaved", pipelines=pipelines, rows=tuple(tuple(row) for row in rows))


def make_samples(
    count: int = 8, seed: int = 0, vocabulary: int = 40, abstained: Sequence[int] = (), cost: bool = False
) -> list[pb.TrainSample]:
    """Return scored samples of unequal lengths with all fields that algorithms need."""
    rng, costs = np.random.default_rng(seed), np.random.default_rng(seed + 1000)
    samples = []
    for index in range(count):
        length = int(rng.integers(3, 14))
        fields = {
            "log_probabilities": -rng.uniform(0.5, 4, length),
            "reference_log_probabilities": -rng.uniform(0.5, 4, length),
            "values": rng.normal(size=length),
        }
        if index not in abstained:
            fields["reward"] = rng.normal(size=1)
        if cost:
            fields |= {"cost_values": costs.normal(size=length), "cost": costs.normal(size=1)}
        samples.append(
            pb.TrainSample(
                sample=index,
                group=index // 4,
                prompt=pack(rng.integers(3, vocabulary, int(rng.integers(1, 7))).astype(np.int32)),
                response=pack(rng.integers(3, vocabulary, length).astype(np.int32)),
                fields={name: pack(value.astype(np.float32)) for name, value in fields.items()},
                abstained=index in abstained,
                finish_reason="stop",
            )
        )
    return samples


PPO_FIELDS = (SAMPLED_FIELD, *full_graph("ppo").scored_fields)


def make_batch(algorithm: str = "ppo", **arguments: Any) -> TrainingBatch:
    """Return `make_samples` as a batch, with the fields of an algorithm."""
    needed = (SAMPLED_FIELD, *full_graph(algorithm).scored_fields)
    samples = make_samples(cost=SampleField.COST in needed, **arguments)
    batch = batch_from(samples, len(samples), needed)
    if not ALGORITHMS[algorithm].greedy_baseline:
        return batch
    return replace(batch, baselines=torch.where(batch.valid, batch.rewards.roll(1), 0.0))


def prepared(job: RLHFJob, batch: TrainingBatch) -> TrainingBatch:
    """Return the batch prepared for training by the job's algorithm in its first state."""
    return build_algorithm(job.spec, CPU).prepare(batch)


def on_ranks(world: int, work: Callable[[int, ThreadCommunicator], Any]) -> list[Any]:
    """Run `work(rank, peers)` on threads; return the results by rank. Raises the first error rather than that of a
    waiter.
    """
    hub = ThreadHub()
    with ThreadPoolExecutor(world) as pool:
        futures = [pool.submit(work, rank, ThreadCommunicator(hub, rank)) for rank in range(world)]
        errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, queue.Empty | AssertionError)):
        raise error
    return [future.result() for future in futures]


def trainer_of(
    job: RLHFJob,
    table: ScheduleTable,
    rank: int,
    world: int,
    peers: Communicator,
    checkpoint: str = "",
    version: int = 0,
) -> Trainer:
    """Return the trainer of one rank, as a BecomeTraining would build it."""
    spans: list[str] = []
    become = pb.BecomeTraining(
        rank=rank, world_size=world, schedule=table.model_dump_json(), checkpoint=checkpoint, version=version
    )

    def connect(layout: RankLayout) -> Communicator:
        assert (layout.rank, layout.world) == (rank, world)
        return peers

    load = STAGES[job.spec.training.backend]
    trainer = build_trainer(job, become, CPU, connect, lambda name, *_, **__: spans.append(name), load)
    trainer.spans = spans  # type: ignore[attr-defined]
    return trainer


def exhaust(steps: Generator[None, None, Result]) -> Result:
    """Run the steps to their end and return their result: an iteration's metrics, or a measurement."""
    while True:
        try:
            next(steps)
        except StopIteration as finished:
            result: Result = finished.value
            return result


Parts = dict[str, dict[int, tuple[int, torch.Tensor]]]
"""Name -> first row or column -> (dimension that is split, value)."""


def parts_of(trainer: Trainer, gradients: bool = False) -> Parts:
    """Return `model:Hugging Face name` -> a rank's part of each parameter, or of each gradient."""
    result: Parts = {}
    for (model, stage), optimizer in trainer.optimizers.items():
        for own, parameter in optimizer.parameters.items():
            tensor = optimizer.gradient(own) if gradients else parameter.detach()
            for name, value in trainer.stages[model, stage].in_folder(own, tensor):
                part = trainer.stages[model, stage].part_of(name)
                place = (0, value) if part is None else (part.dimension, value)
                result.setdefault(f"{model}:{name}", {})[0 if part is None else part.first] = place
    return result


def united(ranks: Sequence[Parts]) -> dict[str, torch.Tensor]:
    """Return the merged parts of all ranks; copies of a part must be equal bit by bit."""
    merged: Parts = {}
    for on_rank in ranks:
        for name, parts in on_rank.items():
            for first, (dimension, value) in parts.items():
                copy = merged.setdefault(name, {}).setdefault(first, (dimension, value))[1]
                if len(copy) != len(value):  # a part without rows may follow the last row
                    merged[name][first] = (dimension, max(copy, value, key=len))
                    continue
                assert torch.equal(copy, value), f"copies of {name} differ"
    return {
        name: next(iter(parts.values()))[1]
        if len(parts) == 1
        else torch.cat([value for _, (_, value) in sorted(parts.items())], dim=next(iter(parts.values()))[0])
        for name, parts in merged.items()
    }


def weights_of(trainers: Sequence[Trainer]) -> dict[str, torch.Tensor]:
    """Return `model:Hugging Face name` -> value over all ranks; copies of a parameter must be equal bit by bit."""
    return united([parts_of(trainer) for trainer in trainers])


def gradients_of(job: RLHFJob, table: ScheduleTable, world: int, batch: TrainingBatch) -> dict[str, torch.Tensor]:
    """Return `model:Hugging Face name` -> gradient of the first mini-batch, summed over everything, before clipping."""

    def work(rank: int, peers: ThreadCommunicator) -> Parts:
        trainer = trainer_of(job, table, rank, world, peers)
        for optimizer in trainer.optimizers.values():
            optimizer.step = lambda *_: None  # type: ignore[method-assign]
        next(trainer.train(0, batch))
        return parts_of(trainer, gradients=True)

    return united(on_ranks(world, work))


def run(
    job: RLHFJob, iterations: range, pipeline: int = 2, data: int = 1, restore: str = "", save: Path | None = None
) -> tuple[list[Trainer], list[dict[str, float]], list[pb.CheckpointFile]]:
    """Train `iterations`, each on its own batch; restore before and save after if requested."""
    parallelism = job.spec.training.parallelism
    table, world = serial(job, pipeline, data), pipeline * data * parallelism.context * parallelism.tensor

    def work(rank: int, peers: ThreadCommunicator) -> tuple[Trainer, list[dict[str, float]], list[pb.CheckpointFile]]:
        trainer = trainer_of(job, table, rank, world, peers, restore, iterations.start)
        metrics = [exhaust(trainer.train(i, make_batch(seed=i))) for i in iterations]
        files = checkpoint.save(trainer, save, iterations.stop) if save else []
        return trainer, metrics, files

    results = on_ranks(world, work)
    assert all(metrics == results[0][1] for _, metrics, _ in results), "ranks report different metrics"
    return [trainer for trainer, _, _ in results], results[0][1], [file for _, _, files in results for file in files]


def assert_bitwise(ours: list[Trainer], theirs: list[Trainer]) -> None:
    left, right = weights_of(ours), weights_of(theirs)
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def finish_folder(folder: Path, source: Path, critic: Path | None = None) -> None:
    """Finish a checkpoint's model folder like the coordinator: configuration and index."""
    for model, configured in (("actor", source), ("critic", critic or source)):
        (folder / model / "config.json").write_bytes((configured / "config.json").read_bytes())
        parts = sorted((folder / model).glob("*.safetensors"))
        index = {name: part.name for part in parts for name in load_file(part)}
        (folder / model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@contextmanager
def group_of_one() -> Iterator[None]:
    """Make ranks that are threads a Megatron group of one rank.

    Before torch.distributed has started, Megatron treats every group as a group of one.
    """
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Alone(ThreadCommunicator):
    """Peers of a group of one."""

    def __init__(self) -> None: ...

    def _meet(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> list[torch.Tensor]:
        assert ranks == (0,)
        return [tensor.clone()]
