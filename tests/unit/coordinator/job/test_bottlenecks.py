"""Log lines of a coordinator about bottlenecks, and their timing."""

import asyncio
import logging

import pytest
from tests.support.jobs.explained_runs import recorded_facts

from rlhf_cli.cluster.job_details import parse_losses
from rlhf_coordinator.job.background_tasks import BackgroundTasks
from rlhf_coordinator.job.bottleneck_log import EVERY_SECONDS, BottleneckLog
from rlhf_coordinator.job.bottlenecks import log_bottlenecks

SLOW = recorded_facts(phases={"Generating": 6.0, "Publishing": 4.0})


async def ended(background: BackgroundTasks) -> None:
    async with asyncio.timeout(60):
        while background.names:  # noqa: ASYNC110 the tasks are the background's own
            await asyncio.sleep(0.01)


async def test_losses_are_said_when_it_is_time_and_not_again_at_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bottlenecks, background = BottleneckLog(next_at=100.0), BackgroundTasks()
    log_bottlenecks(bottlenecks, background, SLOW, 99.0)
    assert not background.names
    log_bottlenecks(bottlenecks, background, SLOW, 100.0)
    log_bottlenecks(bottlenecks, background, SLOW, 101.0)
    assert background.names == ["losses"]
    await ended(background)
    lines = [f'{{"message": "{record.message}"}}' for record in caplog.records if record.message.startswith("loss ")]
    (said,) = parse_losses(lines)
    assert said.startswith("weight publishing: all workers wait 4 s for new weights")
    assert len(bottlenecks.facts) == 3
    assert bottlenecks.next_at >= EVERY_SECONDS


async def test_an_iteration_without_losses_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    background = BackgroundTasks()
    log_bottlenecks(BottleneckLog(next_at=0.0), background, recorded_facts(), 1.0)
    await ended(background)
    assert not [record for record in caplog.records if record.message.startswith("loss ")]
