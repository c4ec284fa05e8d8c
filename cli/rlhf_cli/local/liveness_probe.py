"""Probe whether a process of a local run is alive, as a kubelet would probe it in a pod.

Rule: a process whose probe never succeeded is starting, however long that takes.
"""

import asyncio
from typing import Final

from rlhf_common.endpoint import LIVENESS_PATH
from rlhf_operator.manifests.pods import PROBE_SECONDS, PROBE_TIMEOUT_SECONDS

STARTING_SECONDS: Final = 0.5
"""Most seconds between probes of a process that has not answered yet, so that an early hang is noticed."""


async def until_hung(address: str, seconds: float) -> None:
    """Return when the process at `address` (host:port) hangs: after a success, the periods of failed probes in a row
    add up to `seconds`.
    """
    period = min(float(PROBE_SECONDS), seconds / 3)
    answered, misses = False, 0
    while misses * period < seconds:
        await asyncio.sleep(period if answered else min(period, STARTING_SECONDS))
        if await _answers(address):
            answered, misses = True, 0
        else:
            misses += answered


async def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(f"GET {LIVENESS_PATH} HTTP/1.0\r\n\r\n".encode())
                return (await reader.readline()).split(b" ")[1:2] == [_OK]
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


_OK: Final = b"200"
