"""Reads all that describe and top show of one job. What the user may not read is left out, and said.

Rule: only the job itself has to be readable; everything else makes the picture better.
"""

import asyncio
from collections.abc import Awaitable
from datetime import datetime, timedelta
from typing import Any

from rlhf_api import names
from rlhf_cli.cluster.api import Api
from rlhf_cli.cluster.describe import Facts
from rlhf_cli.cluster.errors import AbsentError, RefusedError, VerbError
from rlhf_cli.cluster.session import Session
from rlhf_cli.cluster.stored import Stored, moment
from rlhf_cli.cluster.timeline import LINES, Iteration, iterations
from rlhf_cli.cluster.workers import workers
from rlhf_operator.manifests.pods import CONTAINER

Json = dict[str, Any]


async def read(session: Session, name: str, now: datetime) -> Facts:
    """Raises VerbError when the job itself cannot be read."""
    job = await session.job(name)
    missing: list[str] = []
    api, where = session.api, job.namespace

    async def listed(resource: str, namespace: str | None, **selectors: str) -> list[Json]:
        return (await api.listing(resource, namespace, **selectors))[0]

    pods, events, past, leases = await asyncio.gather(
        _or_nothing(listed("pods", where, labelSelector=job.selector), "its pods", missing),
        _or_nothing(listed("events", where), "events", missing),
        _or_nothing(_log(api, job), "the last iterations", missing),
        _or_nothing(
            listed("leases", None, fieldSelector=f"metadata.name={names.lease_name(job.operator_class)}"), "", []
        ),
    )
    uids = {job.body["metadata"]["uid"], *(each["metadata"]["uid"] for each in pods)}
    ours = [each for each in events if (each.get("regarding") or {}).get("uid") in uids]
    return Facts(job, workers(pods, ours, now), ours, past, operator_age(leases, now), missing)


def operator_age(leases: list[Json], now: datetime) -> timedelta | None:
    """Since the youngest Lease was renewed; None where there is none."""
    renewed = [moment((each.get("spec") or {}).get("renewTime")) for each in leases]
    known = [each for each in renewed if each is not None]
    return now - max(known) if known else None


async def _log(api: Api, job: Stored) -> list[Iteration]:
    pod = f"{job.name}-{names.Group.COORDINATOR}"
    query = {"tailLines": str(LINES), "container": CONTAINER}
    try:
        return iterations([line.decode(errors="replace") async for line in api.log(job.namespace, pod, query)])
    except (AbsentError, RefusedError):
        return []  # the pod is gone, or its container has not begun


async def _or_nothing(reading: Awaitable[list[Any]], what: str, missing: list[str]) -> list[Any]:
    try:
        return await reading
    except VerbError as error:
        missing.append(f"{what}: {error}")
        return []
