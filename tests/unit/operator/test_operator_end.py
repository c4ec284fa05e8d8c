"""The operator ends on request, even if one of its tasks loses a cancellation."""

import asyncio

from rlhf_operator.__main__ import ended


async def test_a_task_that_loses_its_first_cancellation_is_asked_again() -> None:
    async def loses_one() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await asyncio.sleep(3600)

    task = asyncio.create_task(loses_one())
    await asyncio.sleep(0)
    await asyncio.wait_for(ended([task]), 60)
    assert task.cancelled()
