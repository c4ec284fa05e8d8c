"""Pipelines whose ranks are processes on one device: serial, fused and fused-split tables train the same bits.

On a GPU that the ranks share, the group sends tensors through host memory. On a CPU that transport runs once more in
addition to gloo's, with copies between CPUs, and must give the same bits too.
"""

import hashlib
import json
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from tests.gpu.models import HALF_BILLION, TINY, write_model
from tests.gpu.training_jobs import PRECISIONS, BatchShape, training_job
from tests.support.loopback import free_address
from tests.support.training.training_ranks import exhaust
from torch.multiprocessing.spawn import spawn

from gpu_check.plugin import CheckedMachine, Figures
from gpu_check.results import write_whole
from rlhf_common import control_pb2 as pb
from rlhf_common.schedule import ScheduleTable
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

MEETING_SECONDS: Final = 120.0
MODELS: Final = ("actor", "critic")
RankResult = dict[str, dict[str, dict[str, Any]]]
"""Transport -> schedule -> results of a rank."""


@dataclass(frozen=True)
class RankOrder:
    """The order to the ranks of a group."""

    address: str
    device: str
    precision: str
    folder: Path
    batch: BatchShape
    steps: int
    tables: tuple[str, ...]
    """JSON of each table."""


@pytest.mark.gpu(seconds=180, gigabytes=60)
def test_pipelines(machine: CheckedMachine, figures: Figures) -> None:
    """Two and four ranks on one device: serial, fused and fused-split tables train the same bits; their times."""
    small = BatchShape(samples=1, microbatches=2, prompt=8, response=8)
    batch = machine.sized(small, BatchShape(samples=4, microbatches=8, prompt=128, response=128))
    write_model(machine.scratch / "model", machine.sized(TINY, HALF_BILLION), torch.bfloat16, machine.device)
    precision = PRECISIONS[machine.dtypes[0] if machine.cuda else torch.float32]
    steps, device = machine.sized(1, 3), str(machine.device)
    for ranks in machine.sized((2,), (2, 4)):
        tables = tables_of(ranks, batch.microbatches)
        figures.say(f"{ranks} ranks, each a process on {device}")
        text = tuple(table.model_dump_json() for table in tables)
        order = RankOrder(free_address(), device, precision, machine.scratch, batch, steps, text)
        spawn(rank_main, (order,), nprocs=ranks)  # a forked process cannot use CUDA
        results = [json.loads(result_file(order, rank).read_text()) for rank in range(ranks)]
        judge(results, tables, figures)


def result_file(order: RankOrder, rank: int) -> Path:
    """Return the file that a rank writes."""
    return order.folder / f"rank-{rank}.json"


def tables_of(ranks: int, microbatches: int) -> list[ScheduleTable]:
    """Return the serial table, and the fused and fused-split tables of searches for stages with equal times."""
    pipelines = opposite(MODELS, ranks, microbatches)
    costs = {(model, stage): StageCost(1.0, 2.0, 1.0, 1.0, 1.0) for model in MODELS for stage in range(ranks)}
    transfers = {(rank, rank + 1): 0.05 for rank in range(ranks - 1)}
    tables = [serial_table(pipelines)]
    for method in (FUSED, FUSED_SPLIT):
        asked = coarse(exact_instance(pipelines, costs, transfers, method == FUSED_SPLIT))
        solution = solve(asked, search_options(method, 0.2), count().__next__)
        tables.append(table_of(asked, pipelines, solution_json(solution), method))
    return tables


def judge(results: Sequence[RankResult], tables: Sequence[ScheduleTable], figures: Figures) -> None:
    """Compare the trained results under each table and each transport."""
    ranks, serial, ways = len(results), tables[0].method, list(results[0])
    for way in ways:
        by_table = {table.method: [result[way][table.method] for result in results] for table in tables}
        for method, found in by_table.items():
            figures.row(
                "mini_batches",
                ranks=ranks,
                transport=way,
                schedule=method,
                seconds=max(report["seconds"] for report in found),
                bubble_share=sum(report["bubble_share"] for report in found) / ranks,
                loss=found[0]["loss"],
            )
        digests = {method: [report["digest"] for report in found] for method, found in by_table.items()}
        differing = [method for method, found in digests.items() if found != digests[serial]]
        finite = all(math.isfinite(report["loss"]) for found in by_table.values() for report in found)
        figures.check(
            f"{ranks} ranks over {way}: every table trains the bits of {serial}",
            finite and not differing,
            f"tables that differ: {', '.join(differing) or 'none'}; losses finite: {finite}",
        )
    if len(ways) > 1:
        by_way = [[result[way][serial]["digest"] for result in results] for way in ways]
        figures.check(
            f"{ranks} ranks: {' and '.join(ways)} train the same bits",
            all(digests_of_rank == by_way[0] for digests_of_rank in by_way),
            f"digests of rank 0: {', '.join(digests_of_rank[0][:8] for digests_of_rank in by_way)}",
        )


def rank_main(rank: int, order: RankOrder) -> None:
    """Run one rank: join the group once, then train from the same weights under each table and transport."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # invented log-probabilities never match
    device = open_device(order.device)
    compute_deterministically(device)
    found: RankResult = {}
    job = training_job(order.folder, order.batch, deterministic=True, precision=order.precision)
    ways: list[Communicator] = []
    for text in order.tables:
        table = ScheduleTable.model_validate_json(text)
        become = pb.BecomeTraining(
            rank=rank, world_size=len(table.rows), rendezvous=order.address, group_epoch=1, schedule=text
        )
        ways = ways or meet(become, device, RankLayout(table, rank, len(table.rows)))
        for way in ways:
            trainer = build_trainer(job, become, device, lambda _: way, lambda *_, **__: None)  # noqa: B023
            found.setdefault(way.transport.kind, {})[table.method] = trained(trainer, order.steps)
            del trainer
    write_whole(result_file(order, rank), json.dumps(found))
    os._exit(0)  # without an orderly end of the group, because the others may still be in it


def meet(become: pb.BecomeTraining, device: torch.device, layout: RankLayout) -> list[Communicator]:
    """Return the communicators with the other ranks: the group's choice, and on a CPU also one with copies."""
    chosen = join(become, device, MEETING_SECONDS, layout)
    if device.type != "cpu":
        return [chosen]
    return [chosen, HostCommunicator(chosen, CpuCopies(), GroupTransport("host"))]


def trained(trainer: Trainer, steps: int) -> dict[str, Any]:
    """Train, and return digest, loss, the shortest step and the least bubble share."""
    metrics: dict[str, float] = {}
    seconds, shares = [], []
    for iteration in range(steps):
        metrics = exhaust(trainer.train(iteration, made_up_batch(trainer)))
        seconds.append(trainer.step_seconds[0])
        shares.append(trainer.bubble_seconds / trainer.step_seconds[0])
    digest = hashlib.sha256()
    for _, optimizer in sorted(trainer.optimizers.items()):
        for name in optimizer.owned:
            digest.update(optimizer.parameters[name].detach().cpu().numpy().tobytes())
    loss = sum(value for name, value in metrics.items() if name.endswith("/loss"))
    return {"digest": digest.hexdigest(), "loss": loss, "seconds": min(seconds), "bubble_share": min(shares)}
