"""Measures how fast a worker fetches a model's weights from training ranks over gRPC on loopback, checksums included.

`python benchmarks/weights.py --megabytes 1024 --sources 2 [--tls] [--json]`. Every source is a process of its own with
its share of the model in bfloat16 matrices. The first fetch includes the checksums that a source computes once a
version; later ones are what every further generation worker pays. Beside them: a copy of as many bytes in memory.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import torch

from rlhf_api import control_pb2 as pb
from rlhf_workers.peer_server import start_server
from rlhf_workers.weight_source import WeightSourceService
from rlhf_workers.weights import fetch

MATRIX = (4096, 4096)
"""A weight matrix of a 7B model; 32 MiB in bfloat16."""


class Matrices:
    """A WeightProvider of so many matrices."""

    def __init__(self, stage: int, count: int) -> None:
        generator = torch.Generator().manual_seed(stage)
        self._tensors = {
            f"layers.{stage}.{index}.weight": torch.randn(MATRIX, generator=generator).to(torch.bfloat16)
            for index in range(count)
        }

    def tensors(self, model: str, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """All of them, whatever is asked for."""
        yield from self._tensors.items()


async def serve(stage: int, count: int, certificates: Path | None) -> None:
    """A source process: prints its port, then serves until it is killed."""
    matrices = Matrices(stage, count)
    server = await start_server("127.0.0.1:0", certificates, WeightSourceService(lambda: matrices))
    print(server.port, flush=True)
    await asyncio.Event().wait()


def start_source(stack: ExitStack, stage: int, count: int, certificates: Path | None) -> pb.WeightLocation:
    """Starts a source process that is killed when the stack closes."""
    arguments = ["--serve", str(stage), "--matrices", str(count)]
    arguments += ["--certificates", str(certificates)] if certificates else []
    process = subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout is not None
    return pb.WeightLocation(address=f"127.0.0.1:{int(process.stdout.readline())}")


def new_certificates(folder: Path) -> Path:
    """Certificates of a job, as the local runner makes them."""
    from rlhf_operator.certificates import new_authority

    now = datetime.now(UTC)
    new_authority("benchmark", now).issue([], now).write(folder / "certificates")
    return folder / "certificates"


def measure(megabytes: int, sources: int, repeats: int, *, tls: bool) -> dict[str, float]:
    """Seconds and MiB/s of fetches; bytes are of the whole model."""
    item = max(1, round(megabytes / 32 / sources))
    size = item * sources * MATRIX[0] * MATRIX[1] * 2 / 2**20
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlhf-weights-")))
        certificates = new_certificates(folder) if tls else None
        locations = [start_source(stack, stage, item, certificates) for stage in range(sources)]
        seconds: list[float] = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            tensors = fetch("actor", 1, locations, certificates)
            seconds.append(time.perf_counter() - start)
    assert len(tensors) == item * sources
    start = time.perf_counter()
    copies = [tensor.clone() for tensor in tensors.values()]
    copying = time.perf_counter() - start
    assert len(copies) == len(tensors)
    typical = statistics.median(seconds[1:])
    return {
        "mebibytes": size,
        "sources": sources,
        "tls": tls,
        "first_seconds": round(seconds[0], 3),
        "seconds": round(typical, 3),
        "mebibytes_per_second": round(size / typical, 1),
        "copy_mebibytes_per_second": round(size / copying, 1),
    }


def main() -> int:
    """Prints the figures; always 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--sources", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--matrices", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--certificates", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        asyncio.run(serve(arguments.serve, arguments.matrices, arguments.certificates))
    result = measure(arguments.megabytes, arguments.sources, arguments.repeats, tls=arguments.tls)
    for name, value in result.items():
        print(f"{name}: {value}")
    if arguments.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
