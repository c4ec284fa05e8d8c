"""Pipelines whose ranks are processes on one device: serial, fused and fused-split tables train the same bits.

On a GPU that the ranks share tensors go through host memory, as the group itself decides; on a CPU that way is taken
once more beside gloo's own, by copies between CPUs, and must give the same bits too.
"""

import hashlib
import json
import logging
import math
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from gpu_check.random_models import HALF_BILLION, TINY, LlamaShape, write_model
from gpu_check.step import CheckedMachine, CheckStep, Report, write_whole
from gpu_check.training_jobs import BatchShape, training_job
from rlhf_api import control_pb2 as pb
from rlhf_api.schedule import ScheduleTable
from rlhf_planner.schedule.candidate_tables import StageCost, coarse, exact_instance, search_options, table_of
from rlhf_planner.schedule.methods import FUSED, FUSED_SPLIT, opposite
from rlhf_planner.schedule.report import solution_json
from rlhf_planner.schedule.serial import serial_table
from rlhf_planner.schedule.solve import solve
from rlhf_workers.devices.device import compute_deterministically, open_device
from rlhf_workers.training.backends.torch_backend import build_trainer, join
from rlhf_workers.training.communication.communicator import Communicator
from rlhf_workers.training.communication.host_transport import CpuCopies, HostCommunicator
from rlhf_workers.training.communication.transport import GroupTransport
from rlhf_workers.training.parallel.rank_layout import RankLayout
from rlhf_workers.training.schedule.step_timing import made_up_batch
from rlhf_workers.training.trainer import Trainer

MEETING_SECONDS = 120.0


@dataclass(frozen=True)
class PipelinesSizes:
    """Of the model, of what it trains on, and of the groups."""

    model: LlamaShape
    batch: BatchShape
    ranks: tuple[int, ...]
    steps: int
    """Optimizer steps under each table."""


@dataclass(frozen=True)
class RankOrder:
    """What one rank does."""

    rank: int
    address: str
    device: str
    precision: str
    folder: Path
    batch: BatchShape
    steps: int
    tables: tuple[str, ...]
    """JSON of each."""


def run(machine: CheckedMachine, sizes: PipelinesSizes, report: Report) -> None:
    """Runs a group of processes of each size."""
    write_model(machine.scratch / "model", sizes.model, torch.bfloat16, device=machine.device, fast=machine.cuda)
    precision = "BFloat16" if machine.cuda and machine.bfloat16 else "Float32"
    for ranks in sizes.ranks:
        tables = made_tables(ranks, sizes.batch.microbatches)
        report.say(f"{ranks} ranks, each a process on {machine.device}")
        text = tuple(table.model_dump_json() for table in tables)
        address = free_address()
        orders = [
            RankOrder(rank, address, machine.device, precision, machine.scratch, sizes.batch, sizes.steps, text)
            for rank in range(ranks)
        ]
        judge(run_ranks(orders), tables, report)


def made_tables(ranks: int, microbatches: int) -> list[ScheduleTable]:
    """Return the serial table, and what the search finds for stages that all take the same time."""
    pipelines = opposite(("actor", "critic"), ranks, microbatches)
    costs = {
        (model, stage): StageCost(1.0, 2.0, 1.0, 1.0, 1.0) for model in ("actor", "critic") for stage in range(ranks)
    }
    transfers = {(rank, rank + 1): 0.05 for rank in range(ranks - 1)}
    tables = [serial_table(pipelines)]
    for method in (FUSED, FUSED_SPLIT):
        asked = coarse(exact_instance(pipelines, costs, transfers, method == FUSED_SPLIT))
        solution = solve(asked, search_options(method, 0.2), count().__next__)
        tables.append(table_of(asked, pipelines, solution_json(solution), method))
    return tables


def judge(results: Sequence[dict[str, dict[str, Any]]], tables: Sequence[ScheduleTable], report: Report) -> None:
    """Compares what the ranks trained under each table, and each way that tensors went."""
    ranks, serial = len(results), tables[0].method
    for way in results[0]:
        for table in tables:
            found = [result[way][table.method] for result in results]
            report.row(
                "mini_batches",
                ranks=ranks,
                transport=way,
                schedule=table.method,
                seconds=max(one["seconds"] for one in found),
                bubble_share=sum(one["bubble_share"] for one in found) / ranks,
                loss=found[0]["loss"],
            )
        digests = {table.method: [result[way][table.method]["digest"] for result in results] for table in tables}
        same = {method: found == digests[serial] for method, found in digests.items()}
        finite = all(math.isfinite(result[way][table.method]["loss"]) for result in results for table in tables)
        differing = ", ".join(method for method, alike in same.items() if not alike) or "none"
        report.check(
            f"{ranks} ranks over {way}: every table trains the bits of {serial}",
            all(same.values()) and finite,
            f"tables that differ: {differing}; losses finite: {finite}",
        )
    ways = list(results[0])
    if len(ways) > 1:
        by_way = [[result[way][serial]["digest"] for result in results] for way in ways]
        report.check(
            f"{ranks} ranks: {' and '.join(ways)} train the same bits",
            all(one == by_way[0] for one in by_way),
            f"digests of rank 0: {', '.join(one[0][:8] for one in by_way)}",
        )


def run_ranks(orders: Sequence[RankOrder]) -> list[dict[str, dict[str, Any]]]:
    """Runs a group and returns what each rank found; RuntimeError when one ends otherwise."""
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    processes = [context.Process(target=rank_main, args=(order,)) for order in orders]
    for process in processes:
        process.start()
    try:
        while any(process.is_alive() for process in processes):
            time.sleep(0.1)
            if any(process.exitcode for process in processes):
                break
        codes = [process.exitcode for process in processes]
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}")
    finally:
        for process in processes:
            process.kill()
    return [json.loads(result_file(order).read_text()) for order in orders]


def rank_main(order: RankOrder) -> None:
    """One rank: joins the group once, then trains from the same weights under each table, each way."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # made-up log-probabilities never match
    device = open_device(order.device)
    compute_deterministically(device)
    found: dict[str, dict[str, Any]] = {}
    job = training_job(order.folder / "model", order.batch, precision=order.precision)
    deterministic = job.spec.model_copy(update={"deterministic": True})
    job = job.model_copy(update={"spec": deterministic})
    ways: list[Communicator] = []
    for text in order.tables:
        table = ScheduleTable.model_validate_json(text)
        become = pb.BecomeTraining(
            rank=order.rank, world_size=len(table.rows), rendezvous=order.address, group_epoch=1, schedule=text
        )
        if not ways:
            ways = meet(become, device, RankLayout(table, order.rank, len(table.rows)))
        for communicator in ways:
            trainer = build_trainer(job, become, device, partial(given, communicator), lambda *_, **__: None)
            found.setdefault(communicator.transport.kind, {})[table.method] = trained(trainer, order.steps)
            del trainer
    write_whole(result_file(order), json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # without taking the group down politely: the others may still be in it


def meet(become: pb.BecomeTraining, device: torch.device, layout: RankLayout) -> list[Communicator]:
    """Return the ways to the other ranks: that which the group decides on, and on a CPU through copies as well."""
    chosen = join(become, device, MEETING_SECONDS, layout)
    if device.type != "cpu":
        return [chosen]
    return [chosen, HostCommunicator(chosen, CpuCopies(), GroupTransport("host"))]


def given(communicator: Communicator, layout: RankLayout) -> Communicator:
    """What a trainer is told to speak by."""
    return communicator


def trained(trainer: Trainer, steps: int) -> dict[str, Any]:
    """Trains and returns digest, loss and the shortest step."""
    metrics: dict[str, float] = {}
    seconds, shares = [], []
    for iteration in range(steps):
        training = trainer.train(iteration, made_up_batch(trainer))
        while True:
            try:
                next(training)
            except StopIteration as finished:
                metrics = finished.value
                break
        seconds.append(trainer.step_seconds[0])
        shares.append(trainer.bubble_seconds / trainer.step_seconds[0])
    digest = hashlib.sha256()
    for _, optimizer in sorted(trainer.optimizers.items()):
        for name in optimizer.owned:
            digest.update(optimizer.parameters[name].detach().cpu().numpy().tobytes())
    loss = sum(value for name, value in metrics.items() if name.endswith("/loss"))
    return {"digest": digest.hexdigest(), "loss": loss, "seconds": min(seconds), "bubble_share": min(shares)}


def result_file(order: RankOrder) -> Path:
    """Where a rank writes."""
    return order.folder / f"rank-{order.rank}.json"


def free_address() -> str:
    """Return an address of this machine that nothing listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


STEP = CheckStep(
    "pipelines",
    "two and four ranks on one device: serial, fused and fused-split tables train the same bits; their times",
    run,
    small=PipelinesSizes(TINY, BatchShape(samples=1, microbatches=2, prompt=8, response=8), ranks=(2,), steps=1),
    gpu=PipelinesSizes(
        HALF_BILLION, BatchShape(samples=4, microbatches=8, prompt=128, response=128), ranks=(2, 4), steps=3
    ),
    limit_seconds=180,
    small_limit_seconds=120,
    gpu_gigabytes=60,
)
