"""`rlhf logs`: the logs of a job's pods as one stream.

Rule: the lines of all pods are printed in order of time; with --follow, as they arrive.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any, Final

from rlhf_cli.cluster.api import list_watch
from rlhf_cli.cluster.cluster_job import ClusterJob
from rlhf_cli.cluster.cluster_pod import ClusterPod, cluster_pods
from rlhf_cli.cluster.cluster_session import ClusterSession, now
from rlhf_cli.cluster.errors import VerbError
from rlhf_cli.cluster.log_lines import LogLine, LogPrinter, in_order, parse_line
from rlhf_common import names
from rlhf_common.names import ExitCode, Group
from rlhf_operator.api_client.errors import ApiError, ForbiddenError, MissingError, RefusedError, UnavailableError
from rlhf_operator.manifests.pods import CONTAINER

Json = dict[str, Any]

DEFAULT_TAIL: Final = 20
"""Last lines of each pod to begin with, for several pods without --tail."""
MAX_CONCURRENT_READS: Final = 16
"""Maximum number of logs read concurrently without --follow."""
MAX_FOLLOWED: Final = 64
"""Pods followed concurrently; each is a connection through the API server."""
RETRY_SECONDS: Final = 1.0
"""Seconds between attempts at a container that has not started, and between checks of the pods with --follow."""


@dataclass(frozen=True)
class LogOptions:
    """Arguments of `rlhf logs`."""

    group: Group | None = None
    index: int | None = None
    follow: bool = False
    previous: bool = False
    tail: int | None = None
    raw: bool = False


async def logs(session: ClusterSession, name: str, options: LogOptions) -> int:
    """Print the logs of a job's pods. Return the exit code."""
    job = await session.job(name)
    if options.follow:
        return await _Follower(session, job, options).run()
    return await _print_logs(session, job, options)


def selector(job: ClusterJob, options: LogOptions) -> str:
    """Return the label selector of the pods that the options select."""
    labels = [job.selector]
    if options.group is not None:
        labels.append(f"{names.LABEL_GROUP}={options.group}")
    if options.index is not None:
        labels.append(f"{names.LABEL_INDEX}={options.index}")
    return ",".join(labels)


async def _print_logs(session: ClusterSession, job: ClusterJob, options: LogOptions) -> int:
    bodies, _ = await session.api.listing("pods", job.namespace, labelSelector=selector(job, options))
    pods = cluster_pods(bodies, [], now())
    if not pods:
        raise VerbError(_no_pods(job, options))
    if len(pods) == 1:
        return await _print_whole_log(session, job, pods[0], options)
    slots = asyncio.Semaphore(MAX_CONCURRENT_READS)
    query = _query(options, options.tail if options.tail is not None else DEFAULT_TAIL)

    async def read_log(pod: ClusterPod) -> list[LogLine] | ApiError:
        try:
            async with slots:
                stream = session.api.log(job.namespace, pod.pod.name, query)
                return [parse_line(pod.name, raw) async for raw in stream]
        except ForbiddenError:
            raise
        except (MissingError, RefusedError, UnavailableError) as error:
            return error

    results = await asyncio.gather(*(read_log(pod) for pod in pods))
    printer = LogPrinter(session, [pod.name for pod in pods], raw=options.raw)
    lines = in_order([result for result in results if isinstance(result, list)])
    for line in lines:
        printer.print(line)
    if not lines:
        session.note(f"no pod of {job.name} has written anything yet ({job.state})")
    failures = [(pod, result) for pod, result in zip(pods, results, strict=True) if isinstance(result, ApiError)]
    for pod, error in failures:
        session.note(f"{pod.name}: no log: {error}")
    return int(ExitCode.FAILED) if len(failures) == len(pods) else 0


async def _print_whole_log(session: ClusterSession, job: ClusterJob, pod: ClusterPod, options: LogOptions) -> int:
    """Print one pod's log while reading it, because it may be larger than memory."""
    printer = LogPrinter(session, [pod.name], raw=options.raw)
    empty = True
    try:
        async for raw in session.api.log(job.namespace, pod.pod.name, _query(options, options.tail)):
            printer.print(parse_line(pod.name, raw))
            empty = False
    except ForbiddenError:
        raise
    except (MissingError, RefusedError, UnavailableError) as error:
        raise VerbError(f"{pod.name}: no log: {error}") from error
    if empty:
        session.note(f"{pod.name} has written nothing yet ({pod.state})")
    return 0


@dataclass
class _Follower:
    """One `rlhf logs --follow`: watches the pods, and reads the log of each container in a task."""

    session: ClusterSession
    job: ClusterJob
    options: LogOptions
    bodies: list[Json] | None = None
    """Pods of the last list; None before the first list."""
    readers: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Pod UID -> newest task that reads a log of the pod."""
    started: set[str] = field(default_factory=set)
    """Ids of containers whose log is, or was, being read."""
    printer: LogPrinter = field(init=False)
    limit_noted: bool = False
    """Whether the user knows that not all pods are followed."""

    def __post_init__(self) -> None:
        self.printer = LogPrinter(self.session, [], raw=self.options.raw)

    async def run(self) -> int:
        """Follow until the job has finished or is gone, and no log is left to read. Return the exit code."""
        watching = asyncio.create_task(self._watch())
        try:
            finished = False
            while not finished or not all(task.done() for task in self.readers.values()):
                await asyncio.sleep(RETRY_SECONDS)
                for task in [watching, *self.readers.values()]:
                    if task.done():
                        task.result()  # raises unforeseen errors and missing rights
                if self.bodies is not None:
                    # The job is read before its pods, so that the last lines of all pods are still read.
                    finished = await self._job_finished()
                    self._start_readers(self.bodies, first=not self.started)
        finally:
            tasks = [watching, *self.readers.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return 0

    async def _job_finished(self) -> bool:
        try:
            body = await self.session.api.get(names.PLURAL, self.job.namespace, self.job.name)
        except MissingError:
            return True
        except UnavailableError:
            return False
        return ClusterJob(body).finished or body["metadata"]["uid"] != self.job.body["metadata"]["uid"]

    async def _watch(self) -> None:
        labels = selector(self.job, self.options)
        stream = list_watch(self.session.api, "pods", self.job.namespace, self.session.note, labelSelector=labels)
        async for bodies in stream:
            if self.bodies is None and not any(map(_container_id, bodies.values())):
                none_started = f"no pod of {self.job.name} has begun ({self.job.state})" if bodies else ""
                self.session.note(f"{none_started or _no_pods(self.job, self.options)}; waiting")
            self.bodies = [body for _, body in sorted(bodies.items())]

    def _start_readers(self, bodies: list[Json], *, first: bool) -> None:
        """Start reading new containers. A restarted container waits while the log of its predecessor is still being
        read."""
        pods = {pod.pod.uid: pod for pod in cluster_pods(bodies, [], now())}
        self.printer.add_workers(pod.name for pod in pods.values())
        tail = self.options.tail if self.options.tail is not None else DEFAULT_TAIL if len(pods) > 1 else None
        for body in bodies:
            uid, container = str(body["metadata"]["uid"]), _container_id(body)
            former = self.readers.get(uid)
            if uid not in pods or not container or container in self.started or (former and not former.done()):
                continue
            if sum(not task.done() for task in self.readers.values()) >= MAX_FOLLOWED:
                if not self.limit_noted:
                    self.session.note(f"only {MAX_FOLLOWED} pods are followed: choose with --group and --index")
                self.limit_noted = True
                return
            self.started.add(container)
            self.readers[uid] = asyncio.create_task(self._read(pods[uid], tail if first else None))

    async def _read(self, pod: ClusterPod, tail: int | None) -> None:
        """Print one container's log across broken streams, from its first line or from `tail` lines before its end."""
        since = None
        while True:
            query = _query(self.options, tail) | {"follow": "true"}
            if since is not None:
                query = {key: value for key, value in query.items() if key != "tailLines"}
                query["sinceTime"] = since.strftime("%Y-%m-%dT%H:%M:%SZ")
            try:
                async for raw in self.session.api.log(self.job.namespace, pod.pod.name, query):
                    line = parse_line(pod.name, raw)
                    # sinceTime has whole seconds only, so the stream repeats printed lines.
                    if since is None or line.at is None or line.at > since:
                        self.printer.print(line)
                        since = line.at or since
                return
            except MissingError:
                return
            except ForbiddenError:
                raise
            except RefusedError:
                await asyncio.sleep(RETRY_SECONDS)  # the container has not started yet
            except UnavailableError as error:
                self.session.note(f"{pod.name}: {error}")
                await asyncio.sleep(RETRY_SECONDS)


def _container_id(body: Json) -> str:
    """Return the id of a pod's current container, which changes with every restart; empty before it exists."""
    for status in (body.get("status") or {}).get("containerStatuses") or []:
        if status.get("name") == CONTAINER and status.get("containerID"):
            return str(status["containerID"])
    return ""


def _query(options: LogOptions, tail: int | None) -> dict[str, str]:
    query = {"container": CONTAINER, "timestamps": "true"}
    if options.previous:
        query["previous"] = "true"
    return query | ({"tailLines": str(tail)} if tail is not None else {})


def _no_pods(job: ClusterJob, options: LogOptions) -> str:
    index = "" if options.index is None else f"of index {options.index}"
    which = " ".join(filter(None, [options.group or "", index]))
    return f"{job.name} has no pod {which}".rstrip() + f" ({job.state})"
