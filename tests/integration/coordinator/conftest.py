"""The jobs that a test starts."""

from collections.abc import AsyncIterator

import pytest
from tests.support.coordinator.coordinated import StartedJobs


@pytest.fixture
async def jobs() -> AsyncIterator[StartedJobs]:
    started = StartedJobs()
    yield started
    await started.end()
