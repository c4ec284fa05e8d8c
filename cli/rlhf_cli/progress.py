"""What a run has done so far, as the views need it: metric lines as they are written, and the latest status.

Rule: reading only. The metrics file may be replaced under us (a restarted coordinator rewrites it) and may end in half
a line; every iteration is handed on once.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import grpc

from rlhf_api import channels, control_pb2_grpc
from rlhf_api import control_pb2 as pb

Line = dict[str, Any]
REDIAL_SECONDS: Final = 0.5
"""While the coordinator starts or restarts."""


class MetricsTail:
    """Follows metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0
        self.lines: list[Line] = []
        """Everything read so far, one line an iteration, in order."""

    def read(self) -> list[Line]:
        """Lines of iterations not seen before."""
        try:
            with self._path.open("rb") as file:
                if (inode := self._path.stat().st_ino) != self._inode:
                    self._inode, self._offset = inode, 0
                file.seek(self._offset)
                content = file.read()
        except OSError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        fresh = []
        for text in whole.splitlines():
            line = json.loads(text)
            if not self.lines or line["iteration"] > self.lines[-1]["iteration"]:
                self.lines.append(line)
                fresh.append(line)
        return fresh


async def follow(address: str, certificates: Path, max_rate_hz: float) -> AsyncIterator[pb.JobStatus]:
    """Statuses of the coordinator for as long as the caller wants; dials again whenever the stream breaks."""
    while True:
        async with channels.aio_channel(address, certificates) as channel:
            stub = control_pb2_grpc.CoordinatorStub(channel)
            try:
                async for status in stub.WatchStatus(pb.WatchStatusRequest(max_rate_hz=max_rate_hz)):
                    yield status
            except grpc.aio.AioRpcError:
                pass
        await asyncio.sleep(REDIAL_SECONDS)
