"""The ranks of one training layout, as processes that handle one request at a time.

Rule: a rank is a job's trainer of that backend, on its own core if there are enough. All ranks train the same
mini-batch of synthetic samples. The learning rate is so small that steps hardly differ. A rank ends with the process
that started it.
"""

import argparse
import logging
import os
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import torch

from rlhf_api.algorithms import full_graph
from rlhf_api.algorithms.graph import SAMPLED_FIELD
from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack
from rlhf_common.schedule import ScheduleTable
from rlhf_planner.schedule.methods import opposite
from rlhf_planner.schedule.serial import serial_table
from rlhf_workers.training.backends import megatron_backend, torch_backend
from rlhf_workers.training.batches.training_batch import TrainingBatch, batch_from
from rlhf_workers.training.cost_profile import profile_costs
from rlhf_workers.training.schedule.step_timing import measure
from rlhf_workers.training.trainer import Trainer

LOADS: Final = {"torch": torch_backend.load_stage, "megatron": megatron_backend.load_stage}
VOCABULARY: Final = 512
WAIT_SECONDS: Final = 300.0
"""Time-out for ranks to join, and for each request."""
STILL: Final = 1e-11
"""A learning rate below the resolution of float32 weights over 0.001."""


Result = TypeVar("Result")
SIZES = ("pipeline", "data", "context", "shard", "tensor")


@dataclass(frozen=True)
class Layout:
    """A backend and its division of the models."""

    backend: str
    pipeline: int = 1
    data: int = 1
    context: int = 1
    shard: int = 1
    tensor: int = 1
    shard_optimizer: bool = False

    @property
    def name(self) -> str:
        places = {name: getattr(self, name) for name in SIZES if name != "data" or self.shard == 1}
        named = [self.backend, *(f"{key} {count}" for key, count in places.items() if count > 1)]
        return " ".join([*named, "shardOptimizer"] if self.shard_optimizer else named)

    @property
    def world(self) -> int:
        return self.pipeline * self.data * self.context * self.tensor


def models_of(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the models that the algorithm trains."""
    return tuple(str(role) for role in full_graph(options.algorithm).trained)


def job_of(folder: Path, options: argparse.Namespace, layout: Layout) -> RLHFJob:
    """Return the job that a layout trains."""
    training = {
        "backend": layout.backend,
        "parallelism": {name: getattr(layout, name) for name in SIZES} | {"shardOptimizer": layout.shard_optimizer},
        "optimizer": {"learningRate": STILL, "criticLearningRate": STILL, "weightDecay": 0.0},
    }
    batch = options.micro_batch * options.microbatches
    own: dict[str, int] = {"groupSize": 2} if options.algorithm == "grpo" else {}
    spec = {
        "algorithm": {options.algorithm: {"miniBatchSize": batch, **own}},
        "models": {
            "actor": {"path": str(folder / "actor")},
            "critic": {"path": str(folder / "critic")},
            "reward": {"function": {"module": "none"}},
        },
        "prompts": {"path": "none"},
        # Synthetic samples are half as long as the job's maximum.
        "rollout": {
            "batchSize": batch,
            "maxPromptTokens": 2 * options.prompt,
            "maxResponseTokens": 2 * options.response,
        },
        "training": {"microBatchSize": options.micro_batch, **training},
    }
    body = {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "benchmark"}, "spec": spec}
    return RLHFJob.model_validate(body)


def sample_of(
    rng: np.random.Generator, index: int, prompt: int, response: int, needed: Sequence[str]
) -> pb.TrainSample:
    """Return a random sample with so many tokens and the needed fields; two samples are a group."""
    fields = {name: rng.normal(-1, 0.1, 1 if name == "reward" else response) for name in needed}
    return pb.TrainSample(
        sample=index,
        group=index // 2,
        prompt=pack(rng.integers(3, VOCABULARY, prompt).astype(np.int32)),
        response=pack(rng.integers(3, VOCABULARY, response).astype(np.int32)),
        fields={name: pack(value.astype(np.float32)) for name, value in fields.items()},
    )


def batch_of(options: argparse.Namespace) -> TrainingBatch:
    """Return the mini-batch: random samples of one length, the same as synthetic ones."""
    rng = np.random.default_rng(options.seed)
    count = options.micro_batch * options.microbatches
    needed = (SAMPLED_FIELD, *full_graph(options.algorithm).scored_fields)
    samples = [sample_of(rng, index, options.prompt, options.response, needed) for index in range(count)]
    return batch_from(samples, len(samples), needed)


def take_core(rank: int, ranks: int) -> None:
    """Pin this process to its own core if there are enough for all ranks."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= ranks:
        os.sched_setaffinity(0, {cores[rank]})


def run_measure(steps: Generator[None, None, Result]) -> Result:
    """Run all steps of a measurement and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as finished:
            result: Result = finished.value
            return result


class Rank:
    """One process of a layout; handles its launcher's requests one at a time."""

    def __init__(self, folder: Path, options: argparse.Namespace, layout: Layout, rank: int, address: str) -> None:
        take_core(rank, layout.world)
        torch.set_num_threads(1)
        logging.disable(logging.WARNING)  # synthetic log-probabilities never match
        self._libraries = _status_bytes("VmRSS")
        self._layout, self._rank, self._batch, self._gathered = layout, rank, batch_of(options), 0.0
        pipes = opposite(models_of(options), layout.pipeline, options.microbatches // layout.data)
        become = pb.BecomeTraining(
            rank=rank, world_size=layout.world, rendezvous=address, group_epoch=1,
            schedule=serial_table(pipes).model_dump_json(),
        )  # fmt: skip
        device = torch.device("cpu")
        connect = partial(torch_backend.join, become, device, WAIT_SECONDS)
        job = job_of(folder, options, layout)
        self.trainer: Trainer = torch_backend.build_trainer(
            job, become, device, connect, self._span, LOADS[layout.backend]
        )
        self._remembered = self.trainer.algorithm.state()

    def _span(self, name: str, start_ns: int, end_ns: int, **_: str) -> None:
        if name in ("train/gather", "train/hand-on"):
            self._gathered += (end_ns - start_ns) / 1e9

    def step(self, table: str) -> dict[str, float]:
        """Take one training step with a table, from the algorithm's first state; return its seconds."""
        self.trainer.use_table(ScheduleTable.model_validate_json(table))
        self.trainer.algorithm.restore(self._remembered)  # otherwise the KL coefficient changes
        self._gathered = 0.0
        self.trainer.barrier()
        begun = time.perf_counter()
        for _ in self.trainer.train(0, self._batch):
            pass
        seconds = time.perf_counter() - begun
        return {"seconds": seconds, "mini_batch": self.trainer.step_seconds[0], "gather": self._gathered}

    def hurry(self, urgent: bool) -> None:
        """Give all threads of this process real-time priority, or take it back; needs root."""
        policy, priority = (os.SCHED_RR, 1) if urgent else (os.SCHED_OTHER, 0)
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setscheduler(int(thread.name), policy, os.sched_param(priority))

    def publish(self) -> dict[str, float]:
        """Copy the parameters that this rank publishes, one at a time."""
        self.trainer.barrier()
        begun, size = time.perf_counter(), 0
        for model in self.trainer.layout.models:
            for _, value in torch_backend.TorchBackend(self.trainer).published(model):
                size += value.clone().nbytes
        return {"seconds": time.perf_counter() - begun, "bytes": size}

    def memory(self) -> dict[str, int]:
        """Return the bytes of weights, gradients and moments, and the process's maximum so far beyond that at the
        start.
        """
        sizes: dict[int, int] = {}
        for key, optimizer in self.trainer.optimizers.items():
            whole = getattr(self.trainer.stages[key], "whole_tensors", {})
            of_stage = [*optimizer.parameters.values(), *whole.values(), *optimizer.moments(), optimizer.gradients]
            sizes |= {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in of_stage}
        return {"held": sum(sizes.values()), "peak": _status_bytes("VmHWM") - self._libraries}

    def gradients(self, table: str, path: str) -> None:
        """Write the gradients of the mini-batch with a table, by their names in the folder.

        A rank of a tensor group writes its rows or columns; of sharded parts it writes those of its parameters.
        """
        self.trainer.use_table(ScheduleTable.model_validate_json(table))
        self.trainer.algorithm.restore(self._remembered)
        for optimizer in self.trainer.optimizers.values():
            optimizer.step = lambda *_: None  # type: ignore[method-assign]
        for _ in self.trainer.train(0, self._batch):
            pass
        found: dict[str, torch.Tensor] = {}
        for key, optimizer in self.trainer.optimizers.items():
            for name in optimizer.parameters:
                value = optimizer.gradient(name)
                stage = self.trainer.stages[key]
                named = [(name, value)] if optimizer.over_data else stage.in_folder(name, value)
                for own, mine in named:
                    part = None if optimizer.over_data else stage.part_of(own)
                    found[f"{key[0]}:{own}{'' if part is None else part.ending}"] = mine.clone()
            del optimizer.step
            optimizer.gradients.zero_()
        torch.save(found, path)

    def measure(self) -> bytes:
        """Time the stages and transfers, as a job does."""
        return run_measure(measure(self.trainer, pb.Measure(measurement_id=1))).SerializeToString()

    def profile(self) -> str:
        """Measure the costs for the plan search, as a job does."""
        return run_measure(profile_costs(self.trainer)).text()


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def serve(pipe: Connection, parent: int, rank: Rank) -> None:
    """Handle requests until the process that started this one is gone."""
    pipe.send(None)
    while True:
        while not pipe.poll(1.0):
            if os.getppid() != parent:
                return
        request, values = pipe.recv()
        pipe.send(getattr(rank, request)(*values))
