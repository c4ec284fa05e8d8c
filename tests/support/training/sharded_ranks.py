"""Ranks of sharded stages as processes over gloo.

One launcher imports the libraries and forks the ranks, which carry out a test's orders one after the other. A rank's
results come back in files.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.support.loopback import free_address
from tests.support.training.training_ranks import CPU, exhaust, finish_folder, make_batch, serial

from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_workers.training.backends.torch_backend import TorchBackend, build_trainer, join
from rlhf_workers.training.checkpoints import checkpoint
from rlhf_workers.training.communication.communicator import Communicator
from rlhf_workers.training.optimizers.adamw import MOMENTS
from rlhf_workers.training.optimizers.sharded_optimizer import ShardedOptimizer
from rlhf_workers.training.parallel.rank_layout import RankLayout
from rlhf_workers.training.trainer import Trainer

WAIT = 240.0
"""Seconds that a rank or a test waits for what normally takes a few."""

GO_ON = "go-on"


@dataclass(frozen=True)
class Order:
    """An order to the ranks, from the start of training."""

    name: str
    job: str
    """Job as JSON."""
    first: int = 0
    after: int = 0
    """End of the trained iterations `first` to `after` - 1."""
    restore: str = ""
    save: str = ""
    abstained: tuple[int, ...] = ()
    gradients: bool = False
    """Whether to take no step and report the gradients of the first mini-batch instead."""
    waits: bool = False
    """Whether to wait until the test calls `go_on`."""
    silence: float = WAIT
    """Seconds that a collective waits for a silent rank."""


def parallel(job: RLHFJob, shard: int) -> RLHFJob:
    """Return the same job with this number of sharded ranks; 1: with one rank."""
    body = job.model_dump(by_alias=True, exclude_unset=True)
    sizes = body["spec"].setdefault("training", {}).get("parallelism", {})
    body["spec"]["training"]["parallelism"] = {**sizes, "pipeline": 1, "shard": shard}
    body["spec"]["training"]["parallelism"]["data"] = shard // sizes.get("context", 1)
    return RLHFJob.model_validate(body)


class ShardedRanks:
    """Working ranks and their reports."""

    def __init__(self, folder: Path, world: int, launcher: "subprocess.Popen[str]") -> None:
        self.folder, self.world, self._launcher = folder, world, launcher
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.pids: list[int] = json.loads(self._lines.get(timeout=WAIT))

    def reports(self, name: str) -> list[dict[str, Any]]:
        """Return every rank's reports of an order, by rank, once all have carried it out."""
        files, deadline = [self.folder / f"{name}-{rank}.pt" for rank in range(self.world)], time.monotonic() + WAIT
        while not all(file.exists() for file in files):
            assert self._launcher.poll() is None, f"all ranks ended before they reported {name}"
            assert self._lines.empty(), f"before {name} a rank ended: {self._lines.get()}"
            assert time.monotonic() < deadline, f"waited {WAIT} s for {name}"
            time.sleep(0.02)
        return [torch.load(file) for file in files]

    def go_on(self) -> None:
        """Start the order that is held."""
        (self.folder / GO_ON).touch()

    def ended(self, count: int) -> dict[int, int]:
        """Return rank -> exit code of the next `count` ranks that end."""
        return dict(json.loads(self._lines.get(timeout=WAIT)) for _ in range(count))

    def _read(self) -> None:
        assert self._launcher.stdout is not None
        for line in self._launcher.stdout:
            self._lines.put(line)


@contextmanager
def launched(folder: Path, world: int, orders: Sequence[Order]) -> Iterator[ShardedRanks]:
    """Run ranks that carry out orders; kill the remaining ones at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "orders.json").write_text(json.dumps([asdict(order) for order in orders]))
    command = [sys.executable, "-m", "tests.support.training.sharded_ranks", str(folder), str(world), free_address()]
    launcher = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True
    )
    try:
        yield ShardedRanks(folder, world, launcher)
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait(WAIT)


def whole(reports: Sequence[Mapping[str, Any]], kind: str) -> dict[str, torch.Tensor]:
    """Return tensors of which every rank reports some rows, concatenated in the order of ranks."""
    return {name: torch.cat([report[kind][name] for report in reports]) for name in reports[0][kind]}


def united(reports: Sequence[Mapping[str, Any]], kind: str) -> dict[str, torch.Tensor]:
    """Return tensors that are reported by one rank each."""
    result: dict[str, torch.Tensor] = {}
    for report in reports:
        assert not result.keys() & report[kind].keys()
        result |= report[kind]
    return result


def _carry_out(order: Order, rank: int, world: int, communicator: Communicator) -> dict[str, Any]:
    job = RLHFJob.model_validate_json(order.job)
    models = [name for name in ("actor", "critic") if getattr(job.spec.models, name) is not None]
    data = world // job.spec.training.parallelism.context
    become = pb.BecomeTraining(
        rank=rank, world_size=world, schedule=serial(job, 1, data, models).model_dump_json(),
        checkpoint=order.restore, version=order.first,
    )  # fmt: skip
    trainer = build_trainer(job, become, CPU, lambda layout: communicator, lambda *_, **__: None)
    report: dict[str, Any] = {}
    if order.gradients:
        for optimizer in trainer.optimizers.values():
            optimizer.step = lambda *_: None  # type: ignore[method-assign]
        next(trainer.train(0, make_batch(abstained=order.abstained)))
        report["gradients"] = {
            f"{model}:{name}": optimizer.gradient(name).clone()
            for (model, _), optimizer in trainer.optimizers.items()
            for name in optimizer.parameters
        }
    else:
        report["metrics"] = [exhaust(trainer.train(i, make_batch(seed=i))) for i in range(order.first, order.after)]
    report["published"] = {
        f"{model}:{name}": value.clone() for model in models for name, value in TorchBackend(trainer).published(model)
    }
    report["moments"] = _moments(trainer)
    if order.save:
        files = checkpoint.save(trainer, Path(order.save), order.after)
        report["files"] = [file.path for file in files]
        trainer.barrier()
        if rank == 0:
            finish_folder(Path(order.save), Path(job.spec.models.actor.path))
        trainer.barrier()
    return report


def _moments(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return the rows of every moment on this rank."""
    result: dict[str, torch.Tensor] = {}
    for (model, _), optimizer in trainer.optimizers.items():
        assert isinstance(optimizer, ShardedOptimizer)
        for name, rows in optimizer.parameters.items():
            if not rows.numel():
                result |= {f"{model}:{name}.{moment}": torch.zeros_like(rows.detach()) for moment in MOMENTS}
                continue
            for moment, value in optimizer._adamw.moments(name).items():
                result[f"{model}:{name}.{moment}"] = value.detach()
    return result


def _rank_main(folder: Path, rank: int, world: int, address: str) -> None:
    torch.set_num_threads(1)
    become = pb.BecomeTraining(rank=rank, world_size=world, rendezvous=address, group_epoch=1)
    orders = [Order(**{**order, "abstained": tuple(order["abstained"])}) for order in _orders(folder)]
    job = RLHFJob.model_validate_json(orders[0].job)
    layout = RankLayout(serial(job, 1, world), rank, world)
    communicator = join(become, CPU, WAIT, layout)
    for order in orders:
        deadline = time.monotonic() + 3 * WAIT
        while order.waits and not (folder / GO_ON).exists():
            assert time.monotonic() < deadline, f"waited {3 * WAIT} s to go on with {order.name}"
            time.sleep(0.05)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=order.silence))
        torch.save(_carry_out(order, rank, world, communicator), folder / f"{order.name}-{rank}.tmp")
        (folder / f"{order.name}-{rank}.tmp").rename(folder / f"{order.name}-{rank}.pt")


def _orders(folder: Path) -> list[dict[str, Any]]:
    orders: list[dict[str, Any]] = json.loads((folder / "orders.json").read_text())
    return orders


def _launch(folder: Path, world: int, address: str) -> None:
    """Fork the ranks before this process has a thread; print their pids, then [rank, exit code] of each."""
    pids: list[int] = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            code = 0
            try:
                _rank_main(folder, rank, world, address)
            except BaseException as error:
                traceback.print_exc()
                code = getattr(getattr(error, "failure", None), "exit_code", 0) or 1
            sys.stderr.flush()
            os._exit(code)
        pids.append(pid)
    print(json.dumps(pids), flush=True)
    for _ in pids:
        pid, status = os.wait()
        print(json.dumps([pids.index(pid), os.waitstatus_to_exitcode(status)]), flush=True)


if __name__ == "__main__":
    _launch(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
