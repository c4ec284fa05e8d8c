"""A fake API server with one job, for the tests of the controller."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.support.operator.controlled_cluster import small_job
from tests.support.operator.fake_api_server import FakeApiServer

from rlhf_common import names
from rlhf_operator import job_objects


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send one request after the other, so that the n-th write is the same in every run."""
    monkeypatch.setattr(job_objects, "AT_ONCE", 1)


@pytest_asyncio.fixture
async def server(in_order: None) -> AsyncIterator[FakeApiServer]:
    """Serve a job of four pods."""
    async with FakeApiServer() as running:
        running.put(names.KIND, small_job())
        yield running
