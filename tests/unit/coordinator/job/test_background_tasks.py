"""Background tasks end with the job, have names, and fail without affecting it."""

import asyncio
import logging
from collections.abc import Callable

import pytest

from rlhf_coordinator.job.background_tasks import BackgroundTasks


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 the tasks are the background's own
            await asyncio.sleep(0.001)


async def test_tasks_of_one_name_run_side_by_side_and_all_are_cancelled_at_the_end() -> None:
    background, ended = BackgroundTasks(), list[str]()

    async def wait(label: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(label)

    background.start("fusion choice", wait("first"))
    background.start("fusion choice", wait("second"))
    background.start("checkpoint", asyncio.sleep(0))
    assert background.names == ["checkpoint", "fusion choice", "fusion choice"]
    await until(lambda: len(background.names) < 3)
    assert background.names == ["fusion choice", "fusion choice"], "what has ended is not kept"
    await background.cancel_all()
    assert (sorted(ended), background.names) == (["first", "second"], [])


async def test_a_task_that_fails_is_told_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    background = BackgroundTasks()

    async def fail() -> None:
        raise RuntimeError("the solver is gone")

    with caplog.at_level(logging.ERROR):
        background.start("schedule search", fail())
        await until(lambda: not background.names)
    assert "background task schedule search failed: the solver is gone" in caplog.text
    await background.cancel_all()
