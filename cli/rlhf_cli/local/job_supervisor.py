"""Runs the processes of a job on this machine: starts, restarts, stops. The thin runner around `restarts.decide`.

Rule: no process outlives `run`, however it ends. Every process leads its own process group (so a terminal's Ctrl-C
reaches only the runner, and its children go with it), dies with the runner (`launch`), and carries the run's token, by
which what escaped both is found. Only ids of processes started here are signalled.
"""

import asyncio
import contextlib
import os
import re
import signal
import time
from asyncio.subprocess import Process as Child
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Final

from rlhf_api.names import ExitCode, Group
from rlhf_cli.local import exec_wrapper, leftover_processes
from rlhf_cli.local.fork_client import ForkedProcess, ForkServerClient, ForkServerError, forkable
from rlhf_cli.local.liveness_probe import until_hung
from rlhf_cli.local.pods_to_processes import LocalProcess
from rlhf_cli.local.restart_policy import (
    EndJob,
    ProcessDone,
    ProcessEnd,
    RestartProcess,
    decide_after_end,
    describe_exit,
)

LEAVE_SECONDS: Final = 10.0
"""Time the other processes get to end by themselves after the coordinator did: it told them to."""
UNTOLD_LEAVE_SECONDS: Final = 2.0
"""The same when the coordinator may have ended before anybody could be told anything."""
TERMINATE_SECONDS: Final = 10.0
"""Time between SIGTERM and SIGKILL."""
CHECKPOINT_SECONDS: Final = 60.0
"""Time the coordinator gets for a last checkpoint when the job ends because a worker failed too often."""
_LOG_PREFIX: Final = re.compile(r"^\S+T\S+ [A-Z]+ \S+ ")
"""Time, level and worker of a log line."""


@dataclass(frozen=True)
class Notice:
    """Something a user may want to know."""

    worker: str
    message: str


@dataclass(frozen=True)
class LocalRunResult:
    """How the job ended."""

    code: int
    reason: str
    restarts: Mapping[str, int]
    """Times each process was started again."""


class JobSupervisor:
    """One run. `run` may be called once; `stop` and `kill` while it runs, from the same event loop."""

    def __init__(
        self,
        processes: Sequence[LocalProcess],
        backoff_limit: int,
        token: str,
        report: Callable[[Notice], None],
        leave_seconds: float = LEAVE_SECONDS,
        hang_seconds: float = 0,
    ) -> None:
        """`hang_seconds`: a process that does not answer for so long is killed; 0: nobody asks."""
        self._processes = processes
        self._backoff_limit = backoff_limit
        self._token = token
        self._report = report
        self._leave_seconds, self._hang_seconds = leave_seconds, hang_seconds
        self._forks = ForkServerClient({leftover_processes.TOKEN_VARIABLE: token})
        self._children: dict[str, Child | ForkedProcess] = {}
        self._restarts: dict[str, int] = {process.name: 0 for process in processes}
        self._counted = 0
        self._stopping = False
        self._ended: asyncio.Future[EndJob] | None = None

    @property
    def children(self) -> Mapping[str, int]:
        """Name -> process id of what runs now."""
        return {name: child.pid for name, child in self._children.items()}

    async def run(self) -> LocalRunResult:
        """Starts everything and waits for the end of the job."""
        self._ended = asyncio.get_running_loop().create_future()
        keepers = [asyncio.create_task(self._keep(process)) for process in self._processes]
        for keeper in keepers:
            keeper.add_done_callback(self._keeper_failed)
        try:
            end = await self._ended
            await self._wind_down(end)
        finally:
            for keeper in keepers:
                keeper.cancel()
            self.kill()
            await asyncio.gather(*keepers, return_exceptions=True)
            await self._forks.close()
            if left := leftover_processes.kill_processes(self._token):
                self._report(Notice("", f"ended {len(left)} leftover processes"))
        return LocalRunResult(end.code, end.reason, self._restarts)

    def stop(self) -> None:
        """Asks the coordinator to checkpoint and end; the job ends with it."""
        self._stopping = True
        self._signal(Group.COORDINATOR.value, signal.SIGTERM)
        if Group.COORDINATOR.value not in self._children:
            self._end(EndJob(ExitCode.INTERRUPTED, "stopped while the coordinator was down; --resume goes on"))

    def kill(self) -> None:
        """Ends everything now."""
        self._end(EndJob(ExitCode.INTERRUPTED, "killed"))
        for name in self._children:
            self._signal(name, signal.SIGKILL)

    def _end(self, end: EndJob) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(end)

    def _keeper_failed(self, keeper: asyncio.Task[None]) -> None:
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            self._end(EndJob(ExitCode.FAILED, f"cannot run a process of the job: {error}"))

    async def _keep(self, process: LocalProcess) -> None:
        """Life of one process over all its restarts."""
        streak = 0
        while True:
            started = time.monotonic()
            code = await self._once(process)
            ended = ProcessEnd(process.group, code, time.monotonic() - started, streak, self._counted)
            decision = decide_after_end(ended, self._backoff_limit, stopping=self._stopping)
            assert self._ended is not None
            if isinstance(decision, ProcessDone) or self._ended.done():
                return
            if isinstance(decision, EndJob):
                why = _last_line(process.log) if code > 0 else ""
                self._end(replace(decision, reason=decision.reason + why))
                return
            await self._announce(process, decision, code)
            streak = decision.streak

    async def _announce(self, process: LocalProcess, decision: RestartProcess, code: int) -> None:
        self._counted += decision.counted
        self._restarts[process.name] += 1
        limit = f" (restart {self._counted} of {self._backoff_limit})" if decision.counted else ""
        # What a killed process said last is not why it ended.
        why = _last_line(process.log) if decision.counted and code > 0 else ""
        self._report(
            Notice(
                process.name, f"ended with {describe_exit(code)}, starts again in {decision.delay:.1f} s{limit}{why}"
            )
        )
        await asyncio.sleep(decision.delay)

    async def _once(self, process: LocalProcess) -> int:
        """Starts a process and waits for its end; its process group ends with it."""
        process.log.parent.mkdir(parents=True, exist_ok=True)
        with process.log.open("ab") as log:
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            log.write(f"--- {now} start {self._restarts[process.name] + 1} of {process.name}\n".encode())
            log.flush()
            child = await self._fork(process) or await self._execute(process, log)
        self._children[process.name] = child
        if self._stopping and process.group is Group.COORDINATOR:
            self._signal(process.name, signal.SIGTERM)
        asking = asyncio.create_task(self._end_when_hung(process))
        try:
            return await child.wait()
        finally:
            asking.cancel()
            self._signal(process.name, signal.SIGKILL)
            del self._children[process.name]

    async def _end_when_hung(self, process: LocalProcess) -> None:
        if process.endpoint and self._hang_seconds:
            await until_hung(process.endpoint, self._hang_seconds)
            text = f"did not answer for {self._hang_seconds:.0f} s (spec.runPolicy.hangTimeoutSeconds): it is killed"
            self._report(Notice(process.name, text))
            self._signal(process.name, signal.SIGKILL)

    async def _fork(self, process: LocalProcess) -> ForkedProcess | None:
        """None when it has to be started the ordinary way."""
        if self._forks.broken or not forkable(process):
            return None
        try:
            return await self._forks.start(process)
        except ForkServerError as error:
            self._report(Notice("", str(error)))
            return None

    async def _execute(self, process: LocalProcess, log: BinaryIO) -> Child:
        return await asyncio.create_subprocess_exec(
            *exec_wrapper.wrapper_command(process.cores),
            *process.command,
            env={**os.environ, **process.env, leftover_processes.TOKEN_VARIABLE: self._token},
            cwd=process.folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def _signal(self, name: str, number: signal.Signals) -> None:
        """To the whole group of one process: itself and the children it made."""
        child = self._children.get(name)
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                if number is signal.SIGKILL:
                    os.killpg(child.pid, number)
                else:
                    os.kill(child.pid, number)  # send_signal would poll a dead child, and asyncio then says 255

    async def _wind_down(self, end: EndJob) -> None:
        """Lets the others leave, then asks, then the caller kills."""
        if Group.COORDINATOR.value in self._children:
            self._stopping = True
            self._signal(Group.COORDINATOR.value, signal.SIGTERM)
            await self._all_gone((Group.COORDINATOR.value,), CHECKPOINT_SECONDS)
        names = tuple(process.name for process in self._processes)
        if await self._all_gone(names, self._leave_seconds if end.told else UNTOLD_LEAVE_SECONDS):
            return
        for name in names:
            self._signal(name, signal.SIGTERM)
        await self._all_gone(names, TERMINATE_SECONDS)

    async def _all_gone(self, names: Sequence[str], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while any(name in self._children for name in names):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.05)
        return True


def _last_line(log: Path) -> str:
    """The last line a process wrote, for the message about its end; empty when it wrote nothing."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").strip().splitlines()
        if lines and not lines[-1].startswith("--- "):
            return f": {_LOG_PREFIX.sub('', lines[-1])[:500]}"
    return ""
