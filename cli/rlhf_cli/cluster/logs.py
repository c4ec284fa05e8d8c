"""`rlhf logs`: the logs of a job's pods as one stream.

Rule: without --follow, lines of all pods are put in order of time. With it they come as they come, a container that is
started anew or a pod that joins is followed from its first line on, and the command ends when the job has finished and
every pod that was followed is over.
"""

import asyncio
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rlhf_api import names
from rlhf_api.names import ExitCode, Group
from rlhf_cli.cluster.errors import AbsentError, RefusedError, UnreachableError, VerbError
from rlhf_cli.cluster.follow import follow
from rlhf_cli.cluster.lines import COLOURS, Line, show, split
from rlhf_cli.cluster.session import Session, now
from rlhf_cli.cluster.stored import Stored
from rlhf_cli.cluster.workers import Worker, workers
from rlhf_operator.manifests.pods import CONTAINER

Json = dict[str, Any]

TAIL: Final = 20
"""Lines of each pod when several are shown and nobody said how many."""
AT_ONCE: Final = 16
"""Logs read at once without --follow."""
FOLLOWED: Final = 64
"""Pods followed at once: each is a connection through the API server."""
AGAIN_SECONDS: Final = 1.0
"""Between attempts at a container that has not begun."""


@dataclass(frozen=True)
class Asked:
    """Arguments of `rlhf logs`."""

    group: Group | None = None
    index: int | None = None
    follow: bool = False
    previous: bool = False
    tail: int | None = None
    raw: bool = False


async def logs(session: Session, name: str, asked: Asked) -> int:
    """Prints them."""
    job = await session.job(name)
    return await (_Following(session, job, asked).run() if asked.follow else _once(session, job, asked))


def selector(job: Stored, asked: Asked) -> str:
    """Labels of the pods that are meant."""
    labels = [job.selector]
    if asked.group is not None:
        labels.append(f"{names.LABEL_GROUP}={asked.group}")
    if asked.index is not None:
        labels.append(f"{names.LABEL_INDEX}={asked.index}")
    return ",".join(labels)


async def _once(session: Session, job: Stored, asked: Asked) -> int:
    bodies, _ = await session.api.listing("pods", job.namespace, labelSelector=selector(job, asked))
    pods = workers(bodies, [], now())
    if not pods:
        raise VerbError(_no_pods(job, asked))
    if len(pods) == 1:
        return await _whole(session, job, pods[0], asked)
    slots = asyncio.Semaphore(AT_ONCE)
    tail = asked.tail if asked.tail is not None else TAIL

    async def one(worker: Worker) -> list[Line] | VerbError:
        try:
            async with slots:
                query = _query(asked, tail)
                stream = session.api.log(job.namespace, worker.pod.name, query)
                return [split(worker.name, raw) async for raw in stream]
        except (AbsentError, RefusedError, UnreachableError) as error:
            return error

    found = await asyncio.gather(*(one(each) for each in pods))
    printer = _Printer(session, [each.name for each in pods], asked.raw)
    lines = in_order([each for each in found if isinstance(each, list)])
    printer.some(lines)
    if not lines:
        session.note(f"no pod of {job.name} has written anything yet ({job.state})")
    problems = [(pod, each) for pod, each in zip(pods, found, strict=True) if isinstance(each, VerbError)]
    for pod, problem in problems:
        session.note(f"{pod.name}: no log: {problem}")
    return int(ExitCode.FAILED) if len(problems) == len(pods) else 0


async def _whole(session: Session, job: Stored, worker: Worker, asked: Asked) -> int:
    """One pod's log as it is read: it may be larger than memory."""
    printer = _Printer(session, [worker.name], asked.raw)
    empty = True
    try:
        async for raw in session.api.log(job.namespace, worker.pod.name, _query(asked, asked.tail)):
            printer.one(split(worker.name, raw))
            empty = False
    except (AbsentError, RefusedError, UnreachableError) as error:
        raise VerbError(f"{worker.name}: no log: {error}") from error
    if empty:
        session.note(f"{worker.name} has written nothing yet ({worker.state})")
    return 0


def in_order(logs_of_pods: Sequence[Sequence[Line]]) -> list[Line]:
    """Lines of all by time; those of one pod stay as they are."""
    ranked = []
    for number, lines in enumerate(logs_of_pods):
        latest = float("-inf")
        keyed = []
        for place, line in enumerate(lines):
            latest = max(latest, line.at.timestamp()) if line.at else latest
            keyed.append((latest, number, place, line))
        ranked.append(keyed)
    return [line for _, _, _, line in heapq.merge(*ranked, key=lambda each: each[:3])]


@dataclass
class _Following:
    """One `rlhf logs --follow`."""

    session: Session
    job: Stored
    asked: Asked
    bodies: list[Json] | None = None
    """Pods as they were seen last; None before the first look."""
    readers: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Pod UID -> who reads the container it has now."""
    begun: set[str] = field(default_factory=set)
    """Containers that were, or are, read."""
    printer: "_Printer" = field(init=False)
    told: bool = False
    """That there are more pods than are followed."""

    def __post_init__(self) -> None:
        self.printer = _Printer(self.session, [], self.asked.raw)

    async def run(self) -> int:
        """Until the job has finished and nothing is left to read."""
        watching = asyncio.create_task(self._watch())
        try:
            over = False
            while not over or not all(task.done() for task in self.readers.values()):
                await asyncio.sleep(AGAIN_SECONDS)
                for task in [watching, *self.readers.values()]:
                    if task.done():
                        task.result()  # what nobody foresaw, and rights that lack
                if self.bodies is not None:
                    # Asked before the pods are looked at, so that the last words of all are begun to be read.
                    over = await self._finished()
                    self._attach(self.bodies, first=not self.begun)
        finally:
            tasks = [watching, *self.readers.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return 0

    async def _finished(self) -> bool:
        try:
            body = await self.session.api.get(names.PLURAL, self.job.namespace, self.job.name)
        except AbsentError:
            return True
        except UnreachableError:
            return False
        return Stored(body).finished or body["metadata"]["uid"] != self.job.body["metadata"]["uid"]

    async def _watch(self) -> None:
        where = selector(self.job, self.asked)
        stream = follow(self.session.api, "pods", self.job.namespace, self.session.note, labelSelector=where)
        async for bodies in stream:
            if self.bodies is None and not any(map(_container, bodies.values())):
                told = f"no pod of {self.job.name} has begun ({self.job.state})" if bodies else ""
                self.session.note(f"{told or _no_pods(self.job, self.asked)}; waiting")
            self.bodies = [body for _, body in sorted(bodies.items())]

    def _attach(self, bodies: list[Json], *, first: bool) -> None:
        """Begins to read containers that are new; one of a pod whose last one is still being read has to wait."""
        pods = {each.pod.uid: each for each in workers(bodies, [], now())}
        self.printer.known(each.name for each in pods.values())
        tail = self.asked.tail if self.asked.tail is not None else TAIL if len(pods) > 1 else None
        for body in bodies:
            uid, container = str(body["metadata"]["uid"]), _container(body)
            before = self.readers.get(uid)
            if uid not in pods or not container or container in self.begun or (before and not before.done()):
                continue
            if sum(not task.done() for task in self.readers.values()) >= FOLLOWED:
                if not self.told:
                    self.session.note(f"only {FOLLOWED} pods are followed: choose with --group and --index")
                self.told = True
                return
            self.begun.add(container)
            self.readers[uid] = asyncio.create_task(self._read(pods[uid], tail if first else None))

    async def _read(self, worker: Worker, tail: int | None) -> None:
        """One container from `tail` lines before its end, or its first line, to its last; over broken streams."""
        since = None
        while True:
            query = _query(self.asked, tail) | {"follow": "true"}
            if since is not None:
                query = {key: value for key, value in query.items() if key != "tailLines"}
                query["sinceTime"] = since.strftime("%Y-%m-%dT%H:%M:%SZ")
            try:
                async for raw in self.session.api.log(self.job.namespace, worker.pod.name, query):
                    line = split(worker.name, raw)
                    # sinceTime knows whole seconds only: what was shown is not shown again.
                    if since is None or line.at is None or line.at > since:
                        self.printer.one(line)
                        since = line.at or since
                return
            except AbsentError:
                return
            except RefusedError:
                await asyncio.sleep(AGAIN_SECONDS)  # the container has not begun yet
            except UnreachableError as error:
                self.session.note(f"{worker.name}: {error}")
                await asyncio.sleep(AGAIN_SECONDS)


class _Printer:
    """Lines with a prefix wide enough for every worker seen so far."""

    def __init__(self, session: Session, workers_seen: Sequence[str], raw: bool) -> None:
        self._session, self._raw = session, raw
        self._colours: dict[str, str] = {}
        self.known(workers_seen)

    def known(self, workers_seen: Iterable[str]) -> None:
        for name in workers_seen:
            self._colours.setdefault(name, COLOURS[len(self._colours) % len(COLOURS)])

    def some(self, lines: Sequence[Line]) -> None:
        for line in lines:
            self.one(line)

    def one(self, line: Line) -> None:
        out = self._session.out
        width = max(map(len, self._colours)) if len(self._colours) > 1 else 0
        if self._raw:
            out.file.write(f"{line.worker} {line.text}\n" if width else f"{line.text}\n")
        else:
            out.print(show(line, self._colours[line.worker], width), markup=False, soft_wrap=True)
        if self._session.live or self._raw:
            out.file.flush()


def _container(body: Json) -> str:
    """What tells one life of a pod's container from the next; empty before there is any."""
    for each in (body.get("status") or {}).get("containerStatuses") or []:
        if each.get("name") == CONTAINER and each.get("containerID"):
            return str(each["containerID"])
    return ""


def _query(asked: Asked, tail: int | None) -> dict[str, str]:
    query = {"container": CONTAINER, "timestamps": "true"}
    if asked.previous:
        query["previous"] = "true"
    return query | ({"tailLines": str(tail)} if tail is not None else {})


def _no_pods(job: Stored, asked: Asked) -> str:
    which = " ".join(filter(None, [asked.group or "", "" if asked.index is None else f"of index {asked.index}"]))
    return f"{job.name} has no pod {which}".rstrip() + f" ({job.state})"
