"""A training rank's weight source as a process that a test may kill.

`python -m tests.support.workers.weight_lender [FILE VERSION]` prints its port, then reads commands as lines. `version
N` switches to that version. `halt N` limits every later stream to N chunks, and prints a line when a stream has reached
the limit.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file

from rlhf_common import control_pb2 as pb
from rlhf_workers.failures import WorkError
from rlhf_workers.peer_server import start_server
from rlhf_workers.shared_memory.choice import lent_by
from rlhf_workers.weights.copies import WeightCopies
from rlhf_workers.weights.source import WeightSourceService
from rlhf_workers.worker_role import WeightProvider

HOST = torch.device("cpu")
ROOT = Path(__file__).parents[3]


def weights_of(version: int) -> Mapping[str, torch.Tensor]:
    """Return the weights of a version: more than one chunk, half precision, a scalar and an empty tensor."""
    generator = torch.Generator().manual_seed(version)
    return {
        "matrix": torch.randn(1200, 1000, generator=generator),
        "half": torch.randn(7, 3, generator=generator).to(torch.bfloat16),
        "scalar": torch.tensor(1.5 + version),
        "empty": torch.empty(0, 4),
        "flags": torch.arange(11) % 2 == version % 2,
    }


class VersionedProvider(WeightProvider, Protocol):
    """A WeightProvider whose version can be set."""

    version: int


class VersionedWeights:
    """A WeightProvider of one version at a time."""

    def __init__(self, version: int, of: Callable[[int], Mapping[str, torch.Tensor]] = weights_of) -> None:
        self.version = version
        self._of = of

    def tensors(self, model: str, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a version, checking the version before each."""
        for name, tensor in self._of(version).items():
            if (model, version) != ("actor", self.version):
                message = f"holds actor version {self.version}, asked for {model} {version}"
                raise WorkError("WrongVersion", message)
            yield name, tensor


class HaltingSource(WeightSourceService):
    """Stops permanently in the middle of a stream on command."""

    halt_after: int | None = None
    """Number of chunks before the stop."""

    async def Fetch(self, request: pb.WeightRequest, context: Any) -> AsyncIterator[bytes]:  # noqa: N802
        """Implements WeightSourceService."""
        sent = 0
        async for chunk in super().Fetch(request, context):
            if sent == self.halt_after:
                print("halted", flush=True)
                await asyncio.Event().wait()
            yield chunk
            sent += 1


class Lender:
    """The process, for a test."""

    def __init__(self, *arguments: str, module: str = "tests.support.workers.weight_lender") -> None:
        """`arguments`: a safetensors file and its version; without them `weights_of`, starting with version 1."""
        command = [sys.executable, "-m", module, *arguments]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        self._input, self._output = self.process.stdin, self.process.stdout
        self._port = 0

    @property
    def location(self) -> pb.WeightLocation:
        """Return the location of its weights; waits until it serves."""
        self._port = self._port or int(self._output.readline())
        return pb.WeightLocation(address=f"127.0.0.1:{self._port}")

    def hold(self, version: int) -> None:
        """Switch it to a version."""
        self._say(f"version {version}")
        assert self._output.readline() == "held\n"

    def halt_after(self, chunks: int) -> None:
        """Let it stop after this number of chunks of a stream."""
        self._say(f"halt {chunks}")
        assert self._output.readline() == "halting\n"

    def kill_when_halted(self) -> None:
        """Wait until it has stopped in a stream, then kill it."""
        assert self._output.readline() == "halted\n"
        self.kill()

    def kill(self) -> None:
        """Kill it, and wait until it is gone."""
        self.process.kill()
        self.process.wait()

    def regions(self) -> int:
        """Return the number of memory files that the process has."""
        found = set()
        for link in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                if "memfd:rlhf" in str(link.readlink()):
                    found.add(link.stat().st_ino)
        return len(found)

    def close(self) -> None:
        """Kill it, and close its pipes."""
        self.kill()
        self._input.close()
        self._output.close()

    def _say(self, line: str) -> None:
        assert self.location.address
        print(line, file=self._input, flush=True)


@contextmanager
def ranks(folder: Path, weights: Mapping[str, torch.Tensor], version: int, count: int) -> Iterator[list[Lender]]:
    """Run processes with the weights divided among them: the first two have every second tensor each, a third repeats
    the first.
    """
    names = sorted(weights)
    for half in range(2):
        save_file({name: weights[name] for name in names[half::2]}, folder / f"{half}.safetensors")
    lenders = [Lender(str(folder / f"{number % 2}.safetensors"), str(version)) for number in range(count)]
    try:
        yield lenders
    finally:
        for lender in lenders:
            lender.close()


def versioned(arguments: list[str]) -> VersionedWeights:
    """Return the weights that a command line names."""
    if not arguments:
        return VersionedWeights(1)
    tensors = load_file(arguments[0])
    return VersionedWeights(int(arguments[1]), lambda _: tensors)


async def serve(weights: VersionedProvider, device: torch.device) -> None:
    """Serve weights of a device until the input ends."""
    service = HaltingSource(lambda: weights, WeightCopies(lent_by(device)))
    server = await start_server("127.0.0.1:0", None, service)
    print(server.port, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        order, number = line.split()
        if order == "version":
            weights.version = int(number)
            print("held", flush=True)
        else:
            service.halt_after = int(number)
            print("halting", flush=True)


if __name__ == "__main__":
    asyncio.run(serve(versioned(sys.argv[1:]), HOST))
