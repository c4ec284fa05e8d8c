"""Weights from a rank to an engine on the same device: over gRPC, and in host or device memory that both map.

After every load the engine's weights are compared with the same version read as a stream, which has its own checksums.
"""

import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Final

import pytest
import torch
from tests.gpu.models import ONE_BILLION, TINY, random_model
from tests.gpu.timing import wait_for
from tests.support.workers.weight_lender import Lender

from gpu_check.plugin import CheckedMachine, Figures
from rlhf_workers.failures import WorkError
from rlhf_workers.models.loading import replace_weights
from rlhf_workers.shared_memory.choice import lent_by
from rlhf_workers.shared_memory.regions import MemorySharing
from rlhf_workers.weights.fetching import fetch_weights

NOTICE_SECONDS: Final = 30.0
"""Seconds for a reader to notice that its lender is gone; a closed connection shows it at once."""
LOADS: Final = 2
"""Loads by each way: the first allocates memory and pins it."""


@pytest.mark.gpu(seconds=120, gigabytes=30)
def test_weights(machine: CheckedMachine, figures: Figures) -> None:
    """Weights from a rank to an engine on one device: by gRPC, shared host memory and CUDA IPC, equal each time."""
    device, config = machine.device, machine.sized(TINY, ONE_BILLION)
    model = random_model(config, torch.bfloat16, device)
    figures.add("published_gb", sum(parameter.nbytes for parameter in model.parameters()) / 1e9, "GB")
    ways: dict[str, Sequence[MemorySharing]] = {"stream": ()}
    ways |= {sharing.kind: (sharing,) for sharing in lent_by(device)}
    if machine.cuda:
        figures.check("device memory can be lent", "device_memory" in ways, ", ".join(ways))
    version = 0
    with closing(Lender(str(device), config.to_json_string(), module="tests.gpu.weight_rank")) as rank:
        for way, sharings in ways.items():
            for number in range(1, LOADS + 1):
                version += 1
                figures.say(f"publishing by {way}")
                load(rank, version, way, sharings, model, figures, number)
        lender_dies(rank, version + 1, lent_by(device)[:1], figures)


def load(
    rank: Lender,
    version: int,
    way: str,
    sharings: Sequence[MemorySharing],
    model: Any,
    figures: Figures,
    number: int,
) -> None:
    """Load one version by one way, timed; then read the same as a stream and compare."""
    rank.hold(version)
    started = time.perf_counter()
    with fetch_weights("actor", version, [rank.location], None, sharings) as weights:
        copying = time.perf_counter()
        size = replace_weights(model, weights.tensors, subject=f"actor version {version}")
        weights.confirm()
        wait_for(model.device)
        copied = time.perf_counter() - copying
    seconds = time.perf_counter() - started
    rate = size / seconds / 1e9
    figures.row("loads", way=weights.ways, load=number, seconds=seconds, copy_seconds=copied, gb_per_second=rate)
    if number == LOADS:
        figures.add(f"{way}_gb_per_second", rate, "GB/s, checksums and all")
        figures.add(f"{way}_engine_stopped_seconds", seconds, "s")
    figures.check(f"weights came by {way} as asked ({number})", weights.ways == way, weights.ways)
    with fetch_weights("actor", version, [rank.location], None) as streamed:
        wanted, loaded = streamed.tensors, dict(model.named_parameters())
    other = [name for name, tensor in wanted.items() if not torch.equal(loaded[name].detach().cpu(), tensor)]
    figures.check(f"contents equal by {way} ({number})", not other, ", ".join(other[:3]) or f"{len(wanted)} tensors")


def lender_dies(rank: Lender, version: int, sharings: Sequence[MemorySharing], figures: Figures) -> None:
    """Kill the rank while its memory is lent: host memory stays, and the reader is notified about device memory."""
    if not sharings:
        return
    rank.hold(version)
    noticed = ""
    with fetch_weights("actor", version, [rank.location], None, sharings) as weights:
        rank.kill()
        end = time.monotonic() + NOTICE_SECONDS
        try:
            while sharings[0].transient and time.monotonic() < end:
                weights.confirm()
                time.sleep(0.05)
        except WorkError as error:
            noticed = str(error)
    as_promised = bool(noticed) or not sharings[0].transient
    figures.check("a rank that dies while it lends is noticed", as_promised, noticed or "its memory stays readable")
