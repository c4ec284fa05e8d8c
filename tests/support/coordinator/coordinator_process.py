"""The coordinator as a real process, for tests and benchmarks that start, kill, restart and query it."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import grpc
from tests.support.loopback import free_address

from rlhf_common.channels import aio_channel
from rlhf_common.control_pb2 import GetStatusRequest, WatchStatusRequest
from rlhf_common.control_pb2_grpc import CoordinatorStub
from rlhf_common.names import Env


class CoordinatorProcess:
    """The coordinator's process and its successors."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, free_address()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, environment: Mapping[str, str] | None = None, preexec: Callable[[], None] | None = None) -> None:
        """Start it with additional environment variables; `preexec` runs in the new process first."""
        variables = {
            Env.JOB_FILE: str(self.folder / "job.yaml"),
            Env.RUN_DIR: str(self.folder / "run"),
            Env.LISTEN: self.address,
            **(environment or {}),
        }
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlhf_coordinator"],
                env={**os.environ, **variables},
                stderr=log,
                preexec_fn=preexec,
            )

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    async def code(self, seconds: float = 240.0) -> int:
        assert self.process is not None
        return await asyncio.wait_for(asyncio.to_thread(self.process.wait), seconds)

    async def until_serving(self) -> None:
        """Wait until it serves; reconnect if the connection belongs to its predecessor."""
        while True:
            assert self.process is not None
            assert self.process.poll() is None, f"the coordinator has ended: {self.last_line}"
            async with aio_channel(self.address, None) as channel:
                with contextlib.suppress(grpc.RpcError):
                    await CoordinatorStub(channel).GetStatus(GetStatusRequest(), wait_for_ready=True, timeout=30)
                    return

    async def until_iteration(self, iteration: int, rate: float = 20.0, certificates: Path | None = None) -> None:
        async with aio_channel(self.address, certificates) as channel:
            call = CoordinatorStub(channel).WatchStatus(WatchStatusRequest(max_rate_hz=rate), wait_for_ready=True)
            async for status in call:
                if status.iteration >= iteration:
                    return

    @property
    def last_line(self) -> str:
        return (self.folder / "log").read_text().splitlines()[-1]
