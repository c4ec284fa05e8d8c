"""Runs the processes of a job on this machine: starts, restarts and stops them, as `restart_policy` decides.

Rule: a process leads its own process group, so Ctrl-C in a terminal reaches only the runner. It dies with the runner,
and carries the token with which `leftover_processes` finds its children.
"""

import asyncio
import contextlib
import logging
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

from rlhf_cli.local import exec_wrapper, leftover_processes
from rlhf_cli.local.fork_client import ForkedProcess, ForkServerClient, ForkServerError, forkable
from rlhf_cli.local.liveness_probe import until_hung
from rlhf_cli.local.pods_to_processes import LocalProcess
from rlhf_cli.local.restart_policy import (
    CHECKPOINT_SECONDS,
    LEAVE_SECONDS,
    TERMINATE_SECONDS,
    UNTOLD_LEAVE_SECONDS,
    EndJob,
    ProcessDone,
    ProcessEnd,
    RestartProcess,
    decide_after_end,
    restart_message,
)
from rlhf_common.json_document import parse_json
from rlhf_common.json_logs import JsonLogFormatter
from rlhf_common.names import Env, ExitCode, Group

_LOG_PREFIX: Final = re.compile(r"^\S+T\S+ [A-Z]+ \S+ ")
"""Time, level and worker at the beginning of a log line."""
_START_MARK: Final = "--- "
"""Beginning of the line that precedes the output of a start."""


@dataclass(frozen=True)
class Notice:
    """A message for the user."""

    worker: str
    """Name of the process; empty for the job as a whole."""
    message: str


@dataclass(frozen=True)
class LocalRunResult:
    """How the job ended."""

    code: int
    """Exit code of the run."""
    reason: str
    restarts: Mapping[str, int]
    """Process -> number of restarts decided for it."""


class JobSupervisor:
    """The processes of one run. Call `run` once; call `stop` and `kill` while it runs, from the same event loop."""

    def __init__(
        self,
        processes: Sequence[LocalProcess],
        backoff_limit: int,
        token: str,
        report: Callable[[Notice], None],
        leave_seconds: float = LEAVE_SECONDS,
        hang_seconds: float = 0,
    ) -> None:
        """`leave_seconds`: time that workers get to end by themselves after the job. `hang_seconds`: silence after
        which a process that has answered is killed; 0 means never.
        """
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
        """Process -> its id, for running processes."""
        return {name: child.pid for name, child in self._children.items()}

    async def run(self) -> LocalRunResult:
        """Start every process, wait for the end of the job, and return the result."""
        self._ended = asyncio.get_running_loop().create_future()
        runners = [asyncio.create_task(self._run_process(process)) for process in self._processes]
        for runner in runners:
            runner.add_done_callback(self._runner_failed)
        try:
            end = await self._ended
            await self._wind_down(end)
        finally:
            for runner in runners:
                runner.cancel()
            self.kill()
            await asyncio.gather(*runners, return_exceptions=True)
            await self._forks.close()
            if left := leftover_processes.kill_processes(self._token):
                self._report(Notice("", f"ended {len(left)} leftover processes"))
        return LocalRunResult(end.code, end.reason, self._restarts)

    def stop(self) -> None:
        """Ask the coordinator to save a checkpoint and end, which ends the job."""
        self._stopping = True
        self._signal(Group.COORDINATOR.value, signal.SIGTERM)
        if Group.COORDINATOR.value not in self._children:
            self._end(EndJob(ExitCode.INTERRUPTED, "stopped while the coordinator was down; --resume goes on"))

    def kill(self) -> None:
        """End every process now."""
        self._end(EndJob(ExitCode.INTERRUPTED, "killed"))
        for name in self._children:
            self._signal(name, signal.SIGKILL)

    def _end(self, end: EndJob) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(end)

    def _runner_failed(self, runner: asyncio.Task[None]) -> None:
        if not runner.cancelled() and (error := runner.exception()) is not None:
            self._end(EndJob(ExitCode.FAILED, f"cannot run a process of the job: {error}"))

    async def _run_process(self, process: LocalProcess) -> None:
        """Run one process through all its restarts."""
        streak = 0
        while True:
            started = time.monotonic()
            code = await self._run_once(process)
            ended = ProcessEnd(process.group, code, time.monotonic() - started, streak, self._counted)
            decision = decide_after_end(ended, self._backoff_limit, stopping=self._stopping)
            assert self._ended is not None
            if isinstance(decision, ProcessDone) or self._ended.done():
                return
            if isinstance(decision, EndJob):
                why = _last_line(process.log) if code > 0 else ""
                self._end(replace(decision, reason=decision.reason + why))
                return
            await self._wait_for_restart(process, decision, code)
            streak = decision.streak

    async def _wait_for_restart(self, process: LocalProcess, decision: RestartProcess, code: int) -> None:
        self._counted += decision.counted
        self._restarts[process.name] += 1
        # The last output of a killed process does not explain its end.
        why = _last_line(process.log) if decision.counted and code > 0 else ""
        message = restart_message(decision, code, self._counted, self._backoff_limit)
        self._report(Notice(process.name, f"{message}{why}"))
        await asyncio.sleep(decision.delay)

    async def _run_once(self, process: LocalProcess) -> int:
        """Start a process, wait for its end, and return its exit code; its process group ends with it."""
        process.log.parent.mkdir(parents=True, exist_ok=True)
        with process.log.open("ab") as log:
            log.write(_start_line(process, self._restarts[process.name] + 1))
            log.flush()
            child = await self._fork(process) or await self._execute(process, log)
        self._children[process.name] = child
        if self._stopping and process.group is Group.COORDINATOR:
            self._signal(process.name, signal.SIGTERM)
        watching = asyncio.create_task(self._kill_when_hung(process))
        try:
            return await child.wait()
        finally:
            watching.cancel()
            self._signal(process.name, signal.SIGKILL)
            del self._children[process.name]

    async def _kill_when_hung(self, process: LocalProcess) -> None:
        if process.endpoint and self._hang_seconds:
            await until_hung(process.endpoint, self._hang_seconds)
            text = f"did not answer for {self._hang_seconds:.0f} s (spec.runPolicy.hangTimeoutSeconds): it is killed"
            self._report(Notice(process.name, text))
            self._signal(process.name, signal.SIGKILL)

    async def _fork(self, process: LocalProcess) -> ForkedProcess | None:
        """Return a forked process; None when it must be started the ordinary way."""
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
        """Signal a process; SIGKILL goes to its whole process group."""
        child = self._children.get(name)
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                if number is signal.SIGKILL:
                    os.killpg(child.pid, number)
                else:
                    os.kill(child.pid, number)  # send_signal would poll a dead child, and asyncio then says 255

    async def _wind_down(self, end: EndJob) -> None:
        """Stop a running coordinator, give the other processes time to leave, then ask them to end.

        The caller kills the remaining ones.
        """
        if Group.COORDINATOR.value in self._children:
            self._stopping = True
            self._signal(Group.COORDINATOR.value, signal.SIGTERM)
            await self._all_ended((Group.COORDINATOR.value,), CHECKPOINT_SECONDS)
        names = tuple(process.name for process in self._processes)
        if await self._all_ended(names, self._leave_seconds if end.workers_told else UNTOLD_LEAVE_SECONDS):
            return
        for name in names:
            self._signal(name, signal.SIGTERM)
        await self._all_ended(names, TERMINATE_SECONDS)

    async def _all_ended(self, names: Sequence[str], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while any(name in self._children for name in names):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.05)
        return True


def _start_line(process: LocalProcess, start: int) -> bytes:
    """Return the line that precedes the output of a start in a log, in the format of the log."""
    now, message = datetime.now().astimezone(), f"start {start} of {process.name}"
    if os.environ.get(Env.LOG_FORMAT) != "json":
        return f"{_START_MARK}{now.isoformat(timespec='seconds')} {message}\n".encode()
    record = {"levelname": "INFO", "msg": message, "created": now.timestamp(), "start": start}
    return f"{JsonLogFormatter(process.name, ('start',)).format(logging.makeLogRecord(record))}\n".encode()


def _last_line(log: Path) -> str:
    """Return the last line of a log, for the message about the process's end; empty if it says nothing."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").strip().splitlines()
        if lines and not lines[-1].startswith(_START_MARK):
            said = _message(lines[-1])[:500]
            return f": {said}" if said else ""
    return ""


def _message(line: str) -> str:
    """Return the message of a log line without time and worker; empty for the line of a start."""
    if line.startswith("{"):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            entry = parse_json(line)
            return "" if "start" in entry else str(entry["message"])
    return _LOG_PREFIX.sub("", line)
