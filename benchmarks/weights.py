"""Measures how fast a worker gets a model's weights from training ranks on its machine, including checksums.

`python benchmarks/weights.py --megabytes 1024 --sources 2 [--tls] [--json]`. Every source is a separate process with
its share of the model in bfloat16 matrices. Weights are streamed by gRPC on loopback and borrowed in shared host
memory, in turn, and copied into tensors like those of an engine. The first time includes the work of a source once per
version: checksums of a stream; a copy and its checksums for a loan. Later times are the cost of every further worker.
For comparison: a copy of as many bytes in memory.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import torch

from rlhf_common import control_pb2 as pb
from rlhf_workers.peer_server import start_server
from rlhf_workers.shared_memory.choice import lent_by
from rlhf_workers.shared_memory.regions import MemorySharing
from rlhf_workers.weights.copies import WeightCopies
from rlhf_workers.weights.fetching import fetch_weights
from rlhf_workers.weights.source import WeightSourceService

MATRIX = (4096, 4096)
"""A weight matrix of a 7B model; 32 MiB in bfloat16."""

HOST = torch.device("cpu")


class Matrices:
    """A WeightProvider with `count` matrices."""

    def __init__(self, stage: int, count: int) -> None:
        generator = torch.Generator().manual_seed(stage)
        self._tensors = {
            f"layers.{stage}.{index}.weight": torch.randn(MATRIX, generator=generator).to(torch.bfloat16)
            for index in range(count)
        }

    def tensors(self, model: str, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all matrices for any request."""
        yield from self._tensors.items()


async def serve(stage: int, count: int, certificates: Path | None) -> None:
    """Run a source process: print its port, then serve until it is killed."""
    matrices = Matrices(stage, count)
    service = WeightSourceService(lambda: matrices, WeightCopies(lent_by(HOST)))
    server = await start_server("127.0.0.1:0", certificates, service)
    print(server.port, flush=True)
    await asyncio.Event().wait()


def start_source(stack: ExitStack, stage: int, count: int, certificates: Path | None) -> pb.WeightLocation:
    """Start a source process that is killed when the stack closes."""
    arguments = ["--serve", str(stage), "--matrices", str(count)]
    arguments += ["--certificates", str(certificates)] if certificates else []
    process = subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout is not None
    return pb.WeightLocation(address=f"127.0.0.1:{int(process.stdout.readline())}")


def new_certificates(folder: Path) -> Path:
    """Create the certificates of a job, like the local runner."""
    from rlhf_operator.certificates import new_authority

    now = datetime.now(UTC)
    new_authority("benchmark", now).issue([], now).write(folder / "certificates")
    return folder / "certificates"


def measure(megabytes: int, sources: int, repeats: int, *, tls: bool) -> dict[str, float]:
    """Return seconds and MiB/s of both ways, in turn; bytes are those of the whole model."""
    item = max(1, round(megabytes / 32 / sources))
    size = item * sources * MATRIX[0] * MATRIX[1] * 2 / 2**20
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlhf-weights-")))
        certificates = new_certificates(folder) if tls else None
        locations = [start_source(stack, stage, item, certificates) for stage in range(sources)]
        target = engine_tensors(sources, item)
        streamed: list[float] = []
        borrowed: list[float] = []
        for _ in range(repeats + 1):
            streamed.append(timed_load(target, locations, certificates, ()))
            borrowed.append(timed_load(target, locations, certificates, lent_by(HOST)))
    start = time.perf_counter()
    copies = [tensor.clone() for tensor in target.values()]
    copying = time.perf_counter() - start
    assert len(copies) == item * sources
    answer = {"mebibytes": size, "sources": sources, "tls": tls, "copy_mebibytes_per_second": round(size / copying, 1)}
    for name, seconds in (("stream", streamed), ("borrow", borrowed)):
        typical = statistics.median(seconds[1:])
        answer |= {
            f"{name}_first_seconds": round(seconds[0], 3),
            f"{name}_seconds": round(typical, 3),
            f"{name}_mebibytes_per_second": round(size / typical, 1),
        }
    ratios = [stream / borrow for stream, borrow in zip(streamed[1:], borrowed[1:], strict=True)]
    return answer | {
        "stream_over_borrow_first": round(streamed[0] / borrowed[0], 2),
        "stream_over_borrow": round(statistics.median(ratios), 2),
    }


def engine_tensors(sources: int, count: int) -> dict[str, torch.Tensor]:
    """Return tensors like those of an engine, with their memory touched."""
    names = [f"layers.{stage}.{index}.weight" for stage in range(sources) for index in range(count)]
    return {name: torch.zeros(MATRIX, dtype=torch.bfloat16) for name in names}


def timed_load(
    targets: dict[str, torch.Tensor],
    locations: list[pb.WeightLocation],
    certificates: Path | None,
    sharings: Sequence[MemorySharing],
) -> float:
    """Return the seconds until all weights are in `targets`."""
    start = time.perf_counter()
    with fetch_weights("actor", 1, locations, certificates, sharings) as weights:
        assert weights.ways == ("host_memory" if sharings else "stream"), weights.ways
        for name, target in targets.items():
            target.copy_(weights.tensors[name])
    return time.perf_counter() - start


def main() -> int:
    """Print the figures; always return 0."""
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
