"""The run folder: its lock, and the paths of a run's files.

Rule: one run at a time uses a folder. The kernel releases the lock when the process dies.
"""

import fcntl
import os
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from rlhf_api.job import RLHFJob
from rlhf_cli.local import leftover_processes
from rlhf_cli.local.errors import RunError
from rlhf_common.json_document import parse_json
from rlhf_common.names import ExitCode
from rlhf_operator.manifests.mount_paths import JOB_KEY

RUNS: Final = Path("runs")
"""Default parent of run folders, in the working directory."""
RUNS_NAMED: Final = 3
"""Maximum number of runs in the default parent that a message names."""
_TOKEN: Final = "token"  # noqa: S105 a file name


@dataclass(frozen=True)
class RunPaths:
    """The paths of one run's files."""

    run_dir: Path
    base: Path
    """Folder of the manifest and working directory of the processes, so that they can import a reward module next to
    the manifest."""

    @property
    def certificates(self) -> Path:
        """Folder with ca.crt, tls.crt and tls.key."""
        return self.run_dir / "certificates"

    @property
    def job_file(self) -> Path:
        """Path of the resolved job."""
        return self.run_dir / JOB_KEY

    def log(self, worker: str) -> Path:
        """Return the log file of one process, which stays the same over all restarts."""
        return self.run_dir / "logs" / f"{worker}.log"


def choose_run_dir(job: RLHFJob, run_dir: Path | None, now: datetime, *, resume: bool) -> Path:
    """Return the run folder: the given one, a new one named after job and time, or the latest one to resume."""
    if run_dir is not None:
        return run_dir.absolute()
    if not resume:
        return (RUNS / f"{job.name}-{now:%Y%m%d-%H%M%S}").absolute()
    pattern = re.compile(re.escape(job.name) + r"-\d{8}-\d{6}")
    runs = sorted(path for path in RUNS.glob(f"{job.name}-*") if pattern.fullmatch(path.name) and holds_run(path))
    if not runs:
        raise RunError(f"--resume: no run of job {job.name!r} in {RUNS.absolute()}; give --run-dir")
    return runs[-1].absolute()


def newest_first(runs: Path, job: str) -> Iterator[Path]:
    """Yield the run folders of a job in `runs`, in descending order of names. A folder whose job.json names another job
    is skipped.
    """
    folders = sorted(runs.glob(f"{job}-*"), key=lambda path: path.name, reverse=True)
    return (folder for folder in folders if _job_name(folder) in (job, None))


def _job_name(folder: Path) -> str | None:
    """Return the name of the job that runs in a folder; None if its job.json does not say."""
    try:
        return str(parse_json((folder / "job.json").read_bytes())["metadata"]["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def holds_run(folder: Path) -> bool:
    """Return whether a job has been started in this folder."""
    return (folder / "journal").is_dir() or (folder / "metrics.jsonl").exists()


def why_no_run(folder: Path) -> str:
    """Explain why a folder is no run folder, and name the existing runs."""
    if not folder.exists():
        why = "there is no such folder"
    elif not folder.is_dir():
        why = "is a file, not a folder"
    else:
        why = "there is no run in it, which would have written journal/ and metrics.jsonl"
    runs = sorted((path for path in RUNS.glob("*") if holds_run(path)), key=lambda path: path.stat().st_mtime)
    newest = ", ".join(str(path) for path in runs[: -1 - RUNS_NAMED : -1])
    return f"{why}; " + (f"the newest runs here are {newest}" if runs else f"{RUNS.absolute()} has no runs either")


class RunFolder:
    """A run folder that this process locks until `release` or its own end."""

    def __init__(self, paths: RunPaths, *, resume: bool) -> None:
        """Create and lock the folder, and kill processes that an earlier run in it left.

        Raises RunError when it cannot be made, is in use, contains a run, or lacks a run to resume.
        """
        self.paths, folder = paths, paths.run_dir
        if resume and not holds_run(folder) and not (folder / "checkpoints").is_dir():
            raise RunError(f"--resume --run-dir {folder}: {why_no_run(folder)}; without --resume a new run begins")
        if folder.exists() and not folder.is_dir():
            raise RunError(f"--run-dir {folder}: is a file; give a folder, which is made where there is none")
        try:
            (folder / "logs").mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RunError(f"--run-dir {folder}: {error.strerror}", ExitCode.STORAGE) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunError(f"--run-dir {folder}: another `rlhf run` is using this folder") from error
        if holds_run(folder) and not resume:
            self.release()
            raise RunError(f"--run-dir {folder}: holds a run already; give --resume to go on, or another folder")
        self.token = self._token()
        leftover_processes.kill_processes(self.token)

    def release(self) -> None:
        """Unlock the folder for another run; the end of the process does the same."""
        os.close(self._lock)

    def _token(self) -> str:
        """Return the token that all runs of this folder give their processes, with which the next run finds
        leftovers."""
        path = self.paths.run_dir / _TOKEN
        if not path.exists():
            path.write_text(uuid.uuid4().hex)
        return path.read_text().strip()

    def write(self, name: str, content: bytes) -> None:
        """Write a file of the run folder atomically."""
        partial = self.paths.run_dir / f".{name}.tmp"
        partial.write_bytes(content)
        partial.replace(self.paths.run_dir / name)
