"""Asks a process of a local run whether it lives, as a kubelet would ask it in a pod.

Rule: a process that has never answered is starting, however long that takes; one that answered and then does not for so
long hangs. What is done about it is the supervisor's. Misses are counted, not time: a machine that slept is no hang.
"""

import asyncio
from typing import Final

from rlhf_api.endpoint import LIVENESS_PATH
from rlhf_operator.manifests.pods import PROBE_SECONDS, PROBE_TIMEOUT_SECONDS

STARTING_SECONDS: Final = 0.5
"""Between two questions to a process that has not answered yet: one that hangs soon after its start has then."""


async def until_hung(address: str, seconds: float) -> None:
    """Returns when the process at host:port has answered once and then not for so many seconds."""
    period = min(float(PROBE_SECONDS), seconds / 3)
    lived, misses = False, 0
    while misses * period < seconds:
        await asyncio.sleep(period if lived else min(period, STARTING_SECONDS))
        if await _answers(address):
            lived, misses = True, 0
        else:
            misses += lived


async def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(f"GET {LIVENESS_PATH} HTTP/1.0\r\n\r\n".encode())
                return (await reader.readline()).split(b" ")[1:2] == [_WELL]
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


_WELL: Final = b"200"
