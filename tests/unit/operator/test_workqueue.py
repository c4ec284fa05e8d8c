"""The queue as seen by a reconciler: no key is lost, none runs twice at once, a busy job starves no other."""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from rlhf_operator import workqueue
from rlhf_operator.workqueue import WorkQueue


@contextlib.asynccontextmanager
async def running(
    work: Callable[[str], Awaitable[float | None]], concurrency: int = 2, debounce: float = 0.0
) -> AsyncIterator[WorkQueue]:
    queue = WorkQueue(work, concurrency, debounce)
    task = asyncio.create_task(queue.run())
    try:
        yield queue
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def settle(queue: WorkQueue) -> None:
    deadline = asyncio.get_running_loop().time() + 60
    while asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.001)
        now = queue.snapshot()
        if now.depth == now.active == 0:
            return
    raise AssertionError(f"still busy: {queue.snapshot()}")


async def test_a_key_added_many_times_while_it_waits_is_served_once() -> None:
    served: Counter[str] = Counter()

    async def work(key: str) -> None:
        served[key] += 1

    async with running(work) as queue:
        for _ in range(100):
            queue.add("a")
        await settle(queue)
    assert served == {"a": 1}


async def test_a_key_added_while_it_is_served_is_served_again_and_never_twice_at_once() -> None:
    at_once = 0
    served = 0
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def work(key: str) -> None:
        nonlocal at_once, served
        at_once += 1
        assert at_once == 1
        begun.set()
        await go_on.wait()
        await asyncio.sleep(0.001)
        at_once -= 1
        served += 1

    async with running(work, concurrency=4) as queue:
        queue.add("a")
        await begun.wait()
        queue.add("a")
        queue.add("a")
        go_on.set()
        await settle(queue)
    assert served == 2


async def test_no_more_than_the_concurrency_run_at_once_and_all_are_served() -> None:
    at_once = most = 0
    served = set()

    async def work(key: str) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.001)
        at_once -= 1
        served.add(key)

    async with running(work, concurrency=3) as queue:
        for number in range(50):
            queue.add(str(number))
        await settle(queue)
    assert most == 3
    assert len(served) == 50


async def test_a_job_whose_events_never_stop_does_not_starve_the_others() -> None:
    order: list[str] = []

    async def work(key: str) -> None:
        order.append(key)
        if key == "busy" and len(order) < 40:
            queue.add("busy")

    async with running(work, concurrency=1) as queue:
        queue.add("busy")
        for number in range(10):
            queue.add(f"small-{number}")
        await settle(queue)
    assert {key for key in order[:12] if key != "busy"} == {f"small-{number}" for number in range(10)}


async def test_failures_are_tried_again_later_each_time_and_forgotten_after_a_success(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times: list[float] = []
    first, succeeded = 0.01, asyncio.Event()
    monkeypatch.setattr(workqueue, "FIRST_RETRY_SECONDS", first)

    async def work(key: str) -> None:
        times.append(asyncio.get_running_loop().time())
        if len(times) < 4:
            raise RuntimeError("not yet")
        succeeded.set()

    async with running(work) as queue:
        queue.add("a")
        await asyncio.wait_for(succeeded.wait(), 60)
        await settle(queue)
        assert queue.failures("a") == 0
    assert len(times) == 4
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert all(gap >= first * 2**number * 0.9 for number, gap in enumerate(gaps))


async def test_the_result_of_work_plans_the_next_look_and_the_sooner_of_two_wins() -> None:
    served: list[float] = []
    again = asyncio.Event()
    start = asyncio.get_running_loop().time()

    async def work(key: str) -> float | None:
        served.append(asyncio.get_running_loop().time() - start)
        if len(served) == 2:
            again.set()
        return 0.03 if len(served) == 1 else None

    async with running(work) as queue:
        queue.add("a")
        queue.add_after("a", 30)
        await asyncio.wait_for(again.wait(), 20)  # well before the later of the two
        await settle(queue)
        snapshot = queue.snapshot()
    assert len(served) == 2
    assert served[1] >= 0.029
    assert snapshot.depth == snapshot.active == 0


async def test_a_forgotten_key_is_not_looked_at_again() -> None:
    served = 0

    async def work(key: str) -> None:
        nonlocal served
        served += 1

    async with running(work) as queue:
        queue.add_after("a", 0.02)
        queue.forget("a")
        await asyncio.sleep(0.06)
    assert served == 0


async def test_the_snapshot_tells_how_long_work_hangs() -> None:
    begun = asyncio.Event()

    async def work(key: str) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with running(work, concurrency=1) as queue:
        queue.add("stuck")
        queue.add("waits")
        await begun.wait()
        await asyncio.sleep(0.05)
        snapshot = queue.snapshot()
    assert snapshot.active == snapshot.depth == 1
    assert snapshot.longest_active_seconds >= 0.04
    assert snapshot.oldest_age_seconds >= 0.04


async def test_a_queue_that_is_woken_and_cancelled_at_one_moment_ends() -> None:
    async def work(key: str) -> None:
        return None

    for _ in range(50):
        queue = WorkQueue(work, concurrency=1)
        queue.add_after("later", 30)
        task = asyncio.create_task(queue.run())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        queue.add("now")
        await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=60)
        assert done, "cancelled, and still running"


async def test_a_key_whose_additions_never_stop_is_debounced_and_the_last_addition_is_served() -> None:
    seen: list[int] = []
    added, first, last = 0, asyncio.Event(), asyncio.Event()

    async def work(key: str) -> None:
        seen.append(added)
        first.set()
        if added == 100:
            last.set()

    async with running(work, debounce=0.05) as queue:
        begun = asyncio.get_running_loop().time()
        for _ in range(100):
            added += 1
            queue.add("a")
            await first.wait()
            await asyncio.sleep(0.001)
        took = asyncio.get_running_loop().time() - begun
        await last.wait()
    assert seen[0] == 1
    assert len(seen) <= took / 0.05 + 2


async def test_work_that_asks_for_the_next_itself_is_not_held_up_by_the_debounce() -> None:
    turns, last = 0, asyncio.Event()

    async def work(key: str) -> float | None:
        nonlocal turns
        turns += 1
        if turns == 5:
            last.set()
            return None
        return 0.0

    async with running(work, debounce=3600.0) as queue:
        queue.add("a")
        await asyncio.wait_for(last.wait(), 60)
