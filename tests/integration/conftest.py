"""The time limit of a test with real processes, and what a process of tests shares with a worker.

The tests compute what workers compute, with the same order of sums. gRPC's poller thread lives as long as the process.
"""

import asyncio
from pathlib import Path

import pytest
from grpc.aio import init_grpc_aio

from rlhf_workers.devices.reproducible_sums import ask_for_reproducible_sums

ask_for_reproducible_sums()

LIMIT_SECONDS = 1800
"""Seconds for a test with its fixtures; longer than several waits in it on a machine many times slower than ours. A
wait that times out names its condition, and this limit does not.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Set this limit for every test of this folder without its own."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LIMIT_SECONDS))


@pytest.fixture(autouse=True, scope="session")
def grpc_poller() -> None:
    """Start gRPC's poller thread for the whole process.

    Without this reference, gRPC joins the thread whenever the last channel or server is collected. The collector may
    find that one in any later test, and the join never ends if a call was open when its test ended.
    """

    async def start() -> None:
        init_grpc_aio()

    asyncio.run(start())
