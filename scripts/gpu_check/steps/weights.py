"""Weights from a rank to an engine on the same device: by gRPC, in host memory and in device memory that both map.

After every load the engine's weights are compared with the same version read as a stream, which has its own checksums.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from transformers import LlamaForCausalLM

from gpu_check.random_models import ONE_BILLION, TINY, LlamaShape, config_of
from gpu_check.step import CheckedMachine, CheckStep, Report
from rlhf_api import control_pb2 as pb
from rlhf_workers.failures import WorkError
from rlhf_workers.models.loading import replace_weights
from rlhf_workers.shared_memory.choice import lent_by
from rlhf_workers.shared_memory.regions import MemorySharing
from rlhf_workers.weights.fetching import fetch, fetch_weights

NOTICE_SECONDS: Final = 30.0
"""For a reader to hear that its lender is gone; a closed connection tells at once."""
LOADS: Final = 2
"""By each way: the first takes memory and pins it."""


@dataclass(frozen=True)
class PublishedSizes:
    """Of the model that is published."""

    shape: LlamaShape


class RankProcess:
    """The process of `gpu_check.weight_rank`."""

    def __init__(self, device: str, shape: LlamaShape) -> None:
        command = [sys.executable, "-m", "gpu_check.weight_rank", device, json.dumps(asdict(shape))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = 0
        self.source = pb.WeightLocation(address=f"127.0.0.1:{int(self._answer())}")

    def next_version(self) -> int:
        """Makes its weights others."""
        self.version += 1
        assert self.process.stdin is not None
        self.process.stdin.write(f"{self.version}\n")
        self.process.stdin.flush()
        self._answer()
        return self.version

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the rank ended with {self.process.wait()}; its last words are above")
        return line


@contextmanager
def running(device: str, shape: LlamaShape) -> Iterator[RankProcess]:
    """A rank, killed in the end."""
    rank = RankProcess(device, shape)
    try:
        yield rank
    finally:
        rank.process.kill()
        rank.process.wait()


def run(machine: CheckedMachine, sizes: PublishedSizes, report: Report) -> None:
    """Publishes by each way that the device has, and compares."""
    device = torch.device(machine.device)
    with device:
        model: Any = LlamaForCausalLM._from_config(config_of(sizes.shape), dtype=torch.bfloat16)
    size = sum(parameter.nbytes for parameter in model.parameters())
    report.figure("published_gb", size / 1e9, "GB")
    ways: dict[str, Sequence[MemorySharing]] = {"stream": ()}
    ways |= {sharing.kind: (sharing,) for sharing in lent_by(device)}
    if machine.cuda:
        report.check("device memory can be lent", "device_memory" in ways, ", ".join(ways))
    with running(machine.device, sizes.shape) as rank:
        for way, sharings in ways.items():
            for number in range(1, LOADS + 1):
                report.say(f"publishing by {way}")
                load(rank, way, sharings, model, report, number)
        lender_dies(rank, lent_by(device)[:1], report)


def load(
    rank: RankProcess, way: str, sharings: Sequence[MemorySharing], model: Any, report: Report, number: int
) -> None:
    """One version by one way, timed; then the same as a stream, compared."""
    version = rank.next_version()
    started = time.perf_counter()
    with fetch_weights("actor", version, [rank.source], None, sharings) as weights:
        copying = time.perf_counter()
        size = replace_weights(model, weights.tensors, what=f"actor version {version}")
        weights.confirm()
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        copied = time.perf_counter() - copying
    seconds = time.perf_counter() - started
    report.row(
        "loads", way=weights.ways, load=number, seconds=seconds, copy_seconds=copied, gb_per_second=size / seconds / 1e9
    )
    if number == LOADS:
        report.figure(f"{way}_gb_per_second", size / seconds / 1e9, "GB/s, checksums and all")
        report.figure(f"{way}_engine_stopped_seconds", seconds, "s")
    report.check(f"weights came by {way} as asked ({number})", weights.ways == way, weights.ways)
    wanted = fetch("actor", version, [rank.source], None)
    held = dict(model.named_parameters())
    other = [name for name, tensor in wanted.items() if not torch.equal(held[name].detach().cpu(), tensor)]
    report.check(f"contents equal by {way} ({number})", not other, ", ".join(other[:3]) or f"{len(wanted)} tensors")


def lender_dies(rank: RankProcess, sharings: Sequence[MemorySharing], report: Report) -> None:
    """A rank is killed while its memory is lent: host memory stays, of device memory the reader is told."""
    if not sharings:
        return
    version = rank.next_version()
    noticed = ""
    with fetch_weights("actor", version, [rank.source], None, sharings) as weights:
        rank.process.kill()
        rank.process.wait()
        end = time.monotonic() + NOTICE_SECONDS
        try:
            while sharings[0].transient and time.monotonic() < end:
                weights.confirm()
                time.sleep(0.05)
        except WorkError as error:
            noticed = str(error)
    as_promised = bool(noticed) or not sharings[0].transient
    report.check("a rank that dies while it lends is noticed", as_promised, noticed or "its memory stays readable")


STEP = CheckStep(
    "weights",
    "weights from a rank to an engine on one device: by gRPC, shared host memory and CUDA IPC, equal each time",
    run,
    small=PublishedSizes(TINY),
    gpu=PublishedSizes(ONE_BILLION),
    limit_seconds=120,
    gpu_gigabytes=30,
)
