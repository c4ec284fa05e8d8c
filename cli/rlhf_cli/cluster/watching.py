"""`rlhf describe` and `rlhf top`: read a job whole and show it, once or again and again."""

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.live import Live

from rlhf_api import control_pb2 as pb
from rlhf_api import names
from rlhf_cli.cluster import describe as describing
from rlhf_cli.cluster import facts, live
from rlhf_cli.cluster.describe import Facts
from rlhf_cli.cluster.errors import AbsentError, ForbiddenError, RefusedError, UnreachableError
from rlhf_cli.cluster.session import Session, now
from rlhf_cli.cluster.timeline import as_metrics
from rlhf_cli.cluster.workers import event_time, telling
from rlhf_cli.view import render

EVENTS_SHOWN: Final = 4
"""Latest events below the live view."""
REST_SHARE: Final = 4
"""Times as long as a look took, at least, until the next."""
_NO_METRICS: Final = "the coordinator's metrics cannot be read ({why}), so this is the status, ten seconds old at most"


async def describe(session: Session, name: str) -> int:
    """Prints all that is known."""
    found = await facts.read(session, name, now())
    session.write(describing.describe(found, now(), session.width))
    return 0


async def top(session: Session, name: str, every: float, *, once: bool) -> int:
    """The live view, until Ctrl-C or the end of the job."""
    if once or not session.live:
        found = await facts.read(session, name, now())
        session.out.print(await _view(session, found))
        return 0
    with Live(console=session.out, auto_refresh=False, vertical_overflow="crop") as shown:
        trouble = ""
        while True:
            began = time.monotonic()
            try:
                found = await facts.read(session, name, now())
                shown.update(await _view(session, found), refresh=True)
                trouble = ""
                if found.job.finished:
                    return 0
            except UnreachableError as error:
                if not trouble:
                    session.note(f"{error}; trying again")
                trouble = str(error)
            # A job of a thousand pods is looked at less often: the API server has others to serve.
            await asyncio.sleep(max(every, REST_SHARE * (time.monotonic() - began)))


async def _view(session: Session, found: Facts) -> RenderableType:
    status, notes = await _status(session, found)
    status.waiting_for.extend(_waits(found, status))
    return Group(render(status, as_metrics(found.past), [*_events(found), *notes]))


async def _status(session: Session, found: Facts) -> tuple[pb.JobStatus, Sequence[str]]:
    job = found.job
    if job.finished or not found.pods:
        return live.from_status(job, found.pods), ()
    pod = f"{job.name}-{names.Group.COORDINATOR}"
    try:
        page = await session.api.metrics(job.namespace, pod)
        return live.from_metrics(page, job, found.pods), ()
    except ForbiddenError as error:
        return live.from_status(job, found.pods), [_NO_METRICS.format(why=error)]
    except (AbsentError, RefusedError, UnreachableError, ValueError):
        return live.from_status(job, found.pods), [_NO_METRICS.format(why="its pod does not answer")]


def _waits(found: Facts, status: pb.JobStatus) -> list[str]:
    """What the operator said the job waits for."""
    if status.HasField("failure") or found.job.finished:
        return []
    waits = found.job.state.partition("waits for ")[2]
    return [waits] if waits else []


def _events(found: Facts) -> list[str]:
    return [
        f"{at.astimezone():%H:%M:%S} {each.get('reason')}: {' '.join(str(each.get('note')).split())}"
        for each in telling(found.events)[-EVENTS_SHOWN:]
        if (at := event_time(each)) is not None
    ]
