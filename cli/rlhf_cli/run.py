"""`rlhf run`: load a job, run it as processes of this machine, show it, and name the location of its results.

The processes end with this command (`local.job_supervisor`).
"""

import asyncio
import contextlib
import signal
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from rich.live import Live

from rlhf_api.algorithms import graph_of
from rlhf_cli.console import errors, output
from rlhf_cli.live_view import render
from rlhf_cli.load_job import LoadedJob, load_resolved
from rlhf_cli.local.device_sizes import with_sizes
from rlhf_cli.local.devices import this_machine
from rlhf_cli.local.job_supervisor import JobSupervisor, LocalRunResult, Notice
from rlhf_cli.local.local_job import LocalJob, check_unchanged, prepare_job
from rlhf_cli.local.ports import HeldPorts
from rlhf_cli.local.run_folder import RunFolder, choose_run_dir
from rlhf_cli.run_progress import MetricsTail, fresh_warnings, iteration_line, summary_line, watch_status
from rlhf_common import control_pb2 as pb
from rlhf_common.json_document import parse_json
from rlhf_common.names import ExitCode
from rlhf_coordinator.replanning.drift import is_adopted
from rlhf_coordinator.reports.trackers.summary_json import FILE as SUMMARY
from rlhf_coordinator.reports.trackers.summary_json import write_summary
from rlhf_coordinator.storage.journal import Journal

LIVE_HZ: Final = 4.0
"""Refreshes of the live view per second."""
PLAIN_SECONDS: Final = 0.5
"""Seconds between reads of the metrics for plain output."""
QUIET_SECONDS: Final = 30.0
"""Seconds without a finished iteration after which plain output names the job's obstacle."""
NOTICES: Final = 4
"""Maximum number of latest notices below the live view."""


@dataclass(frozen=True)
class RunOptions:
    """Arguments of `rlhf run`."""

    manifest: Path
    run_dir: Path | None
    resume: bool
    port: int | None
    plain: bool
    overrides: tuple[str, ...] = ()


def run_job(options: RunOptions) -> int:
    """Run a job and return the exit code. Raises ManifestError, RunError, TemplateError before any process starts."""
    now = datetime.now().astimezone()
    loaded = load_resolved(
        options.manifest,
        options.overrides,
        lambda job: choose_run_dir(job, options.run_dir, now, resume=options.resume),
    )
    folder = RunFolder(loaded.run_paths, resume=options.resume)
    if options.resume:  # before a plan is recorded: a refused run leaves its folder as it was
        check_unchanged(folder.paths.job_file, loaded.resolved)
    resume = options.resume
    while (code := _run_with_plan(options, loaded, folder, resume=resume)) is None:
        resume = True
    return code


def _run_with_plan(options: RunOptions, loaded: LoadedJob, folder: RunFolder, *, resume: bool) -> int | None:
    """Run a job with the sizes of its plan; return the exit code, or None if it has stopped for another plan."""
    sized, plan_line = with_sizes(loaded, folder.paths)
    if plan_line:
        output().print(plan_line, markup=False, soft_wrap=True)
    with HeldPorts() as reserved_ports:
        local = prepare_job(sized, folder, this_machine(), options.port, reserved_ports, resume=resume)
        return asyncio.run(_LocalRun(options, folder, local).run())


class _LocalRun:
    """One run on this machine, and its display."""

    def __init__(self, options: RunOptions, folder: RunFolder, local: LocalJob) -> None:
        self._out = output()
        self._folder, self._local = folder, local
        self._live = self._out.is_terminal and not options.plain
        self._notices: deque[str] = deque(maxlen=NOTICES)
        self._status: pb.JobStatus | None = None
        self._warnings: set[str] = set()
        self._tail = MetricsTail(folder.paths.run_dir / "metrics.jsonl")
        policy = local.job.spec.run_policy
        self._supervisor = JobSupervisor(
            local.processes,
            policy.backoff_limit,
            folder.token,
            self._notice,
            hang_seconds=policy.hang_timeout_seconds,
        )
        self._model = graph_of(local.job.spec).policy
        self._interrupts = 0

    async def run(self) -> int | None:
        """Run the job; return its exit code, or None if it has stopped to start again with another plan."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._interrupted)
        run_dir = self._folder.paths.run_dir
        self._print(f"{self._local.job.name}: {len(self._local.processes)} processes, run folder {run_dir}")
        for note in self._local.notes:
            self._print(f"note: {note}")
        self._tail.read()
        watching = asyncio.create_task(self._watch())
        showing = asyncio.create_task(self._show_live() if self._live else self._show_plain())
        try:
            result = await self._supervisor.run()
        finally:
            for task in (showing, watching):
                task.cancel()
            await asyncio.gather(showing, watching, return_exceptions=True)
        if result.code == ExitCode.INTERRUPTED and not self._interrupts and is_adopted(Journal(run_dir / "journal")):
            self._print("the job starts again with another plan")
            return None
        return self._finish(result)

    def _interrupted(self) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            self._notice(Notice("", "stopping after a checkpoint; Ctrl-C again stops at once"))
            self._supervisor.stop()
        else:
            self._supervisor.kill()

    def _notice(self, event: Notice) -> None:
        text = f"{event.worker}: {event.message}" if event.worker else event.message
        self._notices.append(f"{time.strftime('%H:%M:%S')} {text}")
        if not self._live:
            self._print(text)

    def _print(self, text: str) -> None:
        self._out.print(text, markup=False, soft_wrap=True)

    async def _watch(self) -> None:
        """Store the coordinator's latest status; report new plan drift and warnings."""
        async for status in watch_status(self._local.address, self._folder.paths.certificates, LIVE_HZ):
            if status.plan_drift and (self._status is None or status.plan_drift != self._status.plan_drift):
                self._notice(Notice("", f"plan: {status.plan_drift}"))
            self._status = status
            for warning in fresh_warnings(status, self._warnings) if not self._live else ():
                self._print(f"warning: {warning}")

    async def _show_live(self) -> None:
        with Live(console=self._out, auto_refresh=False, transient=False, vertical_overflow="crop") as live:
            while True:
                self._tail.read()
                status = self._status or pb.JobStatus(
                    job=self._local.job.name, phase="Starting", iterations=self._local.job.spec.iterations
                )
                live.update(render(status, self._tail.lines, list(self._notices)), refresh=True)
                await asyncio.sleep(1 / LIVE_HZ)

    async def _show_plain(self) -> None:
        try:
            last_output = time.monotonic()
            while True:
                if self._print_iterations():
                    last_output = time.monotonic()
                elif time.monotonic() - last_output > QUIET_SECONDS and self._status and self._status.waiting_for:
                    self._print(f"{self._status.phase}: waiting for {self._status.waiting_for[0]}")
                    last_output = time.monotonic()
                await asyncio.sleep(PLAIN_SECONDS)
        finally:
            self._print_iterations()

    def _print_iterations(self) -> bool:
        fresh = self._tail.read()
        left = self._status.seconds_left if self._status else 0.0
        for line in fresh:
            self._print(iteration_line(line, self._local.job.spec.iterations, left if line is fresh[-1] else 0.0))
        return bool(fresh)

    def _finish(self, result: LocalRunResult) -> int:
        """Draw the pictures, print the summary and the location of the results, and return the exit code."""
        run_dir = self._folder.paths.run_dir
        code = result.code
        if self._interrupts and code in (ExitCode.OK, ExitCode.INTERRUPTED):
            code = int(ExitCode.INTERRUPTED)
        if code not in (ExitCode.OK, ExitCode.INTERRUPTED):
            errors().print(f"error: {result.reason}", style="red", markup=False, soft_wrap=True)
        summary = self._complete_summary(run_dir, result, code)
        pictures = self._draw(run_dir)
        if summary:
            self._print(summary_line(summary))
        self._print_results(run_dir, summary, pictures)
        return code

    def _complete_summary(self, run_dir: Path, result: LocalRunResult, code: int) -> Mapping[str, Any]:
        """Add the supervisor's own figures to the summary, and return it; empty when no summary can be read."""
        try:
            summary = parse_json((run_dir / SUMMARY).read_text())
        except (OSError, ValueError):
            return {}
        summary |= {"restarts": {name: n for name, n in result.restarts.items() if n}, "exit_code": code}
        with contextlib.suppress(OSError):
            write_summary(run_dir, summary)
        return dict(summary)

    def _draw(self, run_dir: Path) -> list[Path]:
        try:
            from rlhf_coordinator.reports.run_figures import draw_run

            return draw_run(run_dir)
        except Exception as error:  # a failed picture never fails a run
            self._print(f"no pictures: {error}")
            return []

    def _print_results(self, run_dir: Path, summary: Mapping[str, Any], pictures: list[Path]) -> None:
        shown = _short(run_dir)
        checkpoint = summary.get("checkpoint") or (self._status.last_checkpoint if self._status else "")
        if checkpoint:
            self._print(f"  model        {_short(Path(checkpoint) / self._model)}")
        if (run_dir / "tensorboard").is_dir():
            self._print(f"  TensorBoard  tensorboard --logdir {shown / 'tensorboard'}")
        if pictures:
            self._print(f"  pictures     {' '.join(str(_short(picture)) for picture in pictures)}")
        self._print(f"  timeline     {shown / 'timeline.json'} (ui.perfetto.dev or chrome://tracing)")
        self._print(f"  look at      {shown} (summary.json, metrics.jsonl, logs/, job.json)")


def _short(path: Path) -> Path:
    """Return a path relative to the working directory if it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
