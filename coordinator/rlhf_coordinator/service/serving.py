"""One coordinator process between its start and its end: the service is up, the loop runs, workers get their Exit."""

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlhf_common.endpoint import Endpoint
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.job.job_run import JobOutcome, JobRun
from rlhf_coordinator.loop.actions import Actions
from rlhf_coordinator.loop.event_handlers import EventHandlers
from rlhf_coordinator.loop.loop import Loop
from rlhf_coordinator.loop.recovery import resume_iteration
from rlhf_coordinator.scheduling.iteration_end import at_start
from rlhf_coordinator.service.prometheus import prometheus_application
from rlhf_coordinator.service.server import CoordinatorService, start_server
from rlhf_coordinator.storage.journal import Journal
from rlhf_coordinator.storage.journal_lock import WATCH_SECONDS
from rlhf_coordinator.storage.restore import Restored
from rlhf_coordinator.training.checkpoint_saver import CheckpointSaver

log = logging.getLogger(__name__)

EXIT_SECONDS: Final = 5.0
"""Most seconds to wait for the end of the workers' sessions after their Exit."""
STOP_SECONDS: Final = 1.0
"""Most seconds for open calls (a status watcher, the answer to Stop) to end."""


@dataclass(frozen=True)
class ServiceAddresses:
    """The addresses of the coordinator."""

    listen: str
    certificates: Path | None = None


async def serve(
    run: JobRun, restored: Restored, addresses: ServiceAddresses, endpoint: Endpoint | None = None
) -> JobOutcome:
    """Run the job to its end; return the outcome. Raises JobError, for example when an address is unavailable.

    A job whose iterations are all done completes without a server.
    """
    checkpoints = CheckpointSaver(run)
    event_handlers, actions = EventHandlers(run, checkpoints), Actions(run, checkpoints)
    if (end := at_start(run.context, restored.ledger.iteration)) is not None:
        log.info("all %d iterations are done", run.context.spec.iterations)
        actions.carry_out(end)
        return JobOutcome(end.phase)
    server = await start_server(CoordinatorService(run, event_handlers), addresses.listen, addresses.certificates)
    if endpoint is not None:
        endpoint.metrics = prometheus_application(run, addresses.certificates)
        run.background.start("heartbeat of the endpoint", endpoint.keep_beating())
    run.background.start("journal lock", _watch(run.journal))
    try:
        resume_iteration(run, restored, actions)
        await Loop(run, event_handlers, actions).until_over()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_SECONDS):
                await run.sessions.until_empty()
        await server.stop(STOP_SECONDS)
    finally:
        await server.stop(None)
        await run.background.cancel_all()
        run.journal.close()
    assert run.outcome is not None
    return run.outcome


async def _watch(journal: Journal) -> None:
    """End this process if another coordinator has taken over its journal; check every WATCH_SECONDS."""
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        with contextlib.suppress(JobError):  # the lock's file cannot be read
            await asyncio.to_thread(journal.check)
