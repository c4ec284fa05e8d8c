"""The data of one job that `rlhf describe`, `rlhf explain` and `rlhf top` show, read from the API server.

Rule: only the job itself must be readable; `missing` lists what else could not be read, apart from the Lease.
"""

import asyncio
import re
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from rlhf_cli.cluster.api import Api
from rlhf_cli.cluster.cluster_job import ClusterJob, moment
from rlhf_cli.cluster.cluster_pod import ClusterPod, cluster_pods
from rlhf_cli.cluster.cluster_session import ClusterSession
from rlhf_cli.cluster.errors import VerbError
from rlhf_common import names
from rlhf_common.json_document import parse_json
from rlhf_operator.api_client.errors import ApiError, ForbiddenError, MissingError, RefusedError
from rlhf_operator.manifests.pods import CONTAINER

Json = dict[str, Any]

LOG_LINES: Final = 400
"""Maximum number of last lines of the coordinator's log to read."""
_CLOSED: Final = re.compile(r"iteration \d+ \((\d+) of \d+\): reward (\S+), ([\d.]+) samples/s, ([\d.]+) s")
"""The first group is the iteration's number, counted from 1."""
_LOSS: Final = re.compile(r"loss ([1-9]) of iteration (\d+): (.+)")
LOSS_CHARACTERS: Final = 500
"""Longest part of one loss that is shown, in characters."""
_ENTERED: Final = re.compile(r"([A-Z][a-z]+) \(iteration (\d+)\)")


@dataclass
class PastIteration:
    """One iteration that the coordinator's log mentions, finished or not."""

    number: int
    """Number of the iteration, from 0, as in metrics.jsonl."""
    reward: float | None = None
    samples_per_second: float | None = None
    seconds: float | None = None
    """Seconds that it took; None if the log does not have its end."""
    stages: dict[str, float] = field(default_factory=dict)
    """Stage -> seconds, in the order in which the stages were entered."""


@dataclass(frozen=True)
class JobDetails:
    """All data that was read about one job."""

    job: ClusterJob
    pods: Sequence[ClusterPod]
    events: Sequence[Json]
    """Events about the job and its pods."""
    iterations: Sequence[PastIteration]
    operator_age: timedelta | None
    """Time since the operator last renewed its Lease; None when no readable Lease states a time."""
    losses: Sequence[str] = ()
    """Reasons why iterations take so long, largest loss first, from the coordinator's last log lines."""
    missing: Sequence[str] = ()
    """Objects that could not be read, with the reason."""


async def read_details(session: ClusterSession, name: str, now: datetime) -> JobDetails:
    """Read a job and what belongs to it. Raises VerbError or ApiError when the job itself cannot be read."""
    job = await session.job(name)
    missing: list[str] = []
    api, namespace = session.api, job.namespace
    lease = f"metadata.name={names.lease_name(job.operator_class)}"

    async def listed(resource: str, where: str | None, **selectors: str) -> list[Json]:
        return (await api.listing(resource, where, **selectors))[0]

    pods, events, lines, leases = await asyncio.gather(
        _or_nothing(listed("pods", namespace, labelSelector=job.selector), "its pods", missing),
        _or_nothing(listed("events", namespace), "events", missing),
        _or_nothing(_read_log(api, job), "the last iterations", missing),
        _or_nothing(listed("leases", None, fieldSelector=lease), "", []),
    )
    uids = {job.body["metadata"]["uid"], *(pod["metadata"]["uid"] for pod in pods)}
    own_events = [event for event in events if (event.get("regarding") or {}).get("uid") in uids]
    age = operator_age(leases, now)
    read = cluster_pods(pods, own_events, now)
    return JobDetails(job, read, own_events, parse_iterations(lines), age, parse_losses(lines), missing)


def operator_age(leases: list[Json], now: datetime) -> timedelta | None:
    """Return the time since the youngest Lease was renewed; None when no Lease states a time."""
    renewals = [moment((lease.get("spec") or {}).get("renewTime")) for lease in leases]
    valid_renewals = [renewal for renewal in renewals if renewal is not None]
    return now - max(valid_renewals) if valid_renewals else None


def parse_iterations(lines: Iterable[str]) -> list[PastIteration]:
    """Parse log lines into iterations, in order. Stages whose beginning is not among the lines are missing."""
    iterations: dict[int, PastIteration] = {}
    stage: tuple[str, int, datetime] | None = None
    for line in lines:
        at, message = _time_and_message(line)
        if match := _CLOSED.fullmatch(message):
            _leave_stage(iterations, stage, at)
            stage = None
            _close(iterations, match)
        elif (match := _ENTERED.fullmatch(message)) and at is not None:
            _leave_stage(iterations, stage, at)
            stage = (match.group(1), int(match.group(2)), at)
            iterations.setdefault(stage[1], PastIteration(stage[1]))
    return [iterations[number] for number in sorted(iterations)]


def parse_losses(lines: Iterable[str]) -> list[str]:
    """Return the losses in the last group of loss lines of a log, largest first."""
    last, losses = "", dict[str, str]()
    for line in lines:
        if match := _LOSS.fullmatch(_time_and_message(line)[1]):
            number, iteration, words = match.groups()
            if iteration != last or number == "1":
                last, losses = iteration, {}
            losses[number] = words[:LOSS_CHARACTERS]
    return [losses[number] for number in sorted(losses)]


def as_metrics(iterations: Iterable[PastIteration]) -> list[dict[str, Any]]:
    """Return number, reward and speed of the finished iterations under their names in metrics.jsonl."""
    return [
        {
            "iteration": iteration.number,
            "reward": iteration.reward,
            "samples_per_second": iteration.samples_per_second,
        }
        for iteration in iterations
        if iteration.seconds is not None
    ]


async def _read_log(api: Api, job: ClusterJob) -> list[str]:
    """Return the end of the coordinator's log; empty without its container."""
    pod = f"{job.name}-{names.Group.COORDINATOR}"
    query = {"tailLines": str(LOG_LINES), "container": CONTAINER}
    try:
        return [line.decode(errors="replace") async for line in api.log(job.namespace, pod, query)]
    except ForbiddenError:
        raise
    except (MissingError, RefusedError):
        return []  # the pod is gone, or its container has not started


async def _or_nothing(reading: Awaitable[list[Any]], name: str, missing: list[str]) -> list[Any]:
    try:
        return await reading
    except (ApiError, VerbError) as error:
        missing.append(f"{name}: {error}")
        return []


def _leave_stage(
    iterations: Mapping[int, PastIteration], stage: tuple[str, int, datetime] | None, at: datetime | None
) -> None:
    if stage is not None and at is not None:
        name, number, since = stage
        stages = iterations[number].stages
        stages[name] = stages.get(name, 0.0) + max(0.0, (at - since).total_seconds())


def _close(iterations: dict[int, PastIteration], match: re.Match[str]) -> None:
    number = int(match.group(1)) - 1
    closed = iterations.setdefault(number, PastIteration(number))
    reward = match.group(2)
    closed.reward = None if reward in ("none", "nan") else float(reward)
    closed.samples_per_second, closed.seconds = float(match.group(3)), float(match.group(4))


def _time_and_message(line: str) -> tuple[datetime | None, str]:
    """Parse time and message of a log line, which is one JSON object in a pod; (None, "") for any other line."""
    try:
        entry = parse_json(line)
    except ValueError:
        return None, ""
    if not isinstance(entry, dict):
        return None, ""
    return moment(entry.get("time")), str(entry.get("message") or "")
