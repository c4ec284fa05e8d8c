"""Runs the steps one after the other, each in a process of its own, within a budget of seconds.

Rule: nothing that a step does ends the run; a step that no longer fits is said to be left out. Imports the standard
library only: what a step needs is on the PYTHONPATH of its process.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from gpu_check.processes import adopt_orphans, run_limited
from gpu_check.results import LOG_FILE, Results, Status, verdict
from gpu_check.source import FOLDERS, source_of

DESCRIBE_SECONDS = 240
"""Loading torch and all steps from a cold disk, on a machine that is busy: against hanging alone."""
WRITE_SECONDS = 2
"""Between two looks at what a running step has reported."""
LOG_LINES = 15
"""Of each process of a step, shown when it failed."""
FIT = 0.5
"""A step is begun while this share of its limit is left of the budget: limits are generous."""
BUSY = 5
"""Times its limit that a step may take on a CPU while the budget lasts: there it shares the cores with anything."""


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    root: Path
    """The source tree."""
    output: Path
    site: Path
    """Folder of the installed wheels."""
    prepared: Path
    steps: tuple[str, ...]
    small: bool
    device: str
    budget_seconds: float


class Run:
    """One run."""

    def __init__(self, options: Options) -> None:
        """Nothing is started yet."""
        self.options = options
        self._started = time.monotonic()
        self._scratch = Path(tempfile.mkdtemp(prefix="gpu-check-"))
        self._log = (options.output / LOG_FILE).open("w", buffering=1)
        about = {
            "started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "source": source_of(options.root, options.prepared),
            "small": options.small,
            "budget_seconds": options.budget_seconds,
            "seconds": 0.0,
            "machine": {},
        }
        self.results = Results(options.output, about)

    def all_steps(self) -> int:
        """Runs every step that was asked for; the number of those that failed."""
        adopt_orphans()
        signal.signal(signal.SIGTERM, self._stop)
        described = self._describe()
        machine = described["machine"]
        # Without a GPU the large sizes would take hours.
        small = self.options.small or machine["device"] == "cpu"
        self.results.about |= {"machine": machine, "small": small}
        self.results.write()
        for step in described["steps"]:
            self.step(step, machine, small)
        self._tell(f"{self._elapsed():.0f} s in all; results are in {self.options.output}")
        for name, result in self.results.steps.items():
            self._tell(f"  {result['status']:9} {name}{': ' if result['why'] else ''}{result['why']}")
        left = [name for name, result in self.results.steps.items() if result["status"] == Status.LEFT_OUT]
        if left:
            self._tell(f"for what was left out: scripts/gpu-check --steps {','.join(left)} --output ANOTHER_FOLDER")
        return len(self.results.failed())

    def close(self) -> None:
        """Closes the log and removes what steps left."""
        self._log.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _describe(self) -> dict[str, Any]:
        output = self._scratch / "described.json"
        said: list[str] = []
        command = [sys.executable, "-m", "gpu_check.step_process", "describe", self.options.device, str(output)]
        status = run_limited(
            [*command, *self.options.steps],
            self._environment(self._scratch),
            DESCRIBE_SECONDS,
            said.append,
            lambda: None,
        )
        if status != 0 or not output.exists():
            raise SystemExit("gpu-check: torch or the steps cannot be loaded here:\n" + "\n".join(said[-20:]))
        described: dict[str, Any] = json.loads(output.read_text())
        return described

    def step(self, step: dict[str, Any], machine: dict[str, Any], small: bool) -> None:
        """Runs one step, or says why it is not run."""
        name = step["name"]
        if "broken" in step:
            self.results.put(name, Status.FAILED, f"cannot be loaded: {step['broken']}", 0, {})
            return
        if step["needs_gpu"] and machine["device"] == "cpu":
            self.results.put(name, Status.NOT_HERE, "needs a GPU", 0, step)
            return
        small = small or machine["memory_bytes"] < step["gpu_gigabytes"] * 1e9
        limit = step["small_limit_seconds"] if small else step["limit_seconds"]
        left = self.options.budget_seconds - self._elapsed()
        if left < FIT * limit:
            why = f"{left:.0f} s of the budget were left, its limit is {limit} s"
            self.results.put(name, Status.LEFT_OUT, why, 0, step)
            return
        patience = limit * BUSY if machine["device"] == "cpu" else limit
        self._run_step(step, machine, small, min(patience, left))

    def _run_step(self, step: dict[str, Any], machine: dict[str, Any], small: bool, limit: float) -> None:
        name, started = step["name"], time.monotonic()
        scratch = self._scratch / name
        scratch.mkdir()
        report, request = self._scratch / f"{name}.report.json", self._scratch / f"{name}.request.json"
        asked = {
            **machine,
            "small": small,
            "scratch": str(scratch),
            "report": str(report),
            "results": self.results.steps,
        }
        request.write_text(json.dumps(asked))
        self._tell(f"== {name} (at most {limit:.0f} s): {step['shows']}")
        written = started

        def keep() -> None:
            nonlocal written
            if time.monotonic() - written > WRITE_SECONDS:
                written = time.monotonic()
                self._put(name, Status.RUNNING, "", written - started, step | _read(report))

        command = [sys.executable, "-u", "-m", "gpu_check.step_process", "run", name, str(request)]
        status = run_limited(command, self._environment(scratch), limit, lambda line: self._tell(f"  {line}"), keep)
        said = step | _read(report)
        ended, why = verdict(said, status, limit)
        self._put(name, ended, why, time.monotonic() - started, said)
        if ended is Status.FAILED:
            self._tell_logs(scratch)
        self._tell(f"== {name}: {ended}{': ' if why else ''}{why}")
        shutil.rmtree(scratch, ignore_errors=True)

    def _tell_logs(self, scratch: Path) -> None:
        """The ends of the logs that a failed step's processes wrote, before its folder is removed."""
        for log in sorted(scratch.rglob("*.log")):
            self._tell(f"  -- the end of {log.relative_to(scratch)}")
            for line in log.read_text(errors="replace").splitlines()[-LOG_LINES:]:
                self._tell(f"  {line}")

    def _put(self, name: str, status: Status, why: str, seconds: float, said: dict[str, Any]) -> None:
        self.results.about["seconds"] = round(self._elapsed(), 1)
        self.results.put(name, status, why, seconds, said)

    def _environment(self, scratch: Path) -> dict[str, str]:
        """The product from the source tree, the wheels before what is installed, and nothing from the network."""
        folders = [str(self.options.root / folder) for folder in FOLDERS]
        inherited = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
        # Without bytecode every process would compile all of torch; it is kept for this run where none may stay.
        kept = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(self._scratch / "bytecode")}
        return {
            **os.environ,
            **(kept if os.environ.get("PYTHONDONTWRITEBYTECODE") else {}),
            "PYTHONPATH": ":".join(dict.fromkeys([*folders, str(self.options.site), *inherited])),
            "TMPDIR": str(scratch),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _tell(self, line: str) -> None:
        self._log.write(line + "\n")
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    @staticmethod
    def _stop(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(f"gpu-check: ended by signal {signum}; what was measured is kept")


def _read(report: Path) -> dict[str, Any]:
    """What a step said so far."""
    return json.loads(report.read_text()) if report.exists() else {}
