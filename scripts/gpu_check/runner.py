"""Runs the steps one after the other, each with pytest in a separate process, within a budget of seconds.

Owns the order of the steps, and the processes. No failure of a step ends the run, and a step's processes end with it.
Must never import more than the standard library, nor signal a process that no step started.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any, NamedTuple

from gpu_check.results import FAILED, LEFT_OUT, LOG_FILE, RUNNING, Results
from gpu_check.source import FOLDERS, source_of

STEPS = (
    "machine", "decode", "scoring", "deterministic", "weights", "kv_migration", "offload", "colocated", "moments",
    "quickstart_ppo", "half_billion_job", "half_billion_colocated", "train_step", "packing", "context", "megatron",
    "pipelines", "planner_truth", "tests", "kernels", "speculation",
)  # fmt: skip
"""Names of tests/gpu/test_NAME.py by importance: if time runs short, the last ones are skipped."""
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.2
START_SECONDS = 240
"""Time-out in seconds for loading torch and a step, against hangs only."""
GRACE_SECONDS = 15
"""Seconds beyond a step's limit in which pytest-timeout writes the stacks of all threads."""
LEAST_SECONDS = 10
"""Minimum seconds of the budget to start a step."""
LOG_LINES = 15
"""Lines of each log of a step's processes that are shown after a failure."""


class Options(NamedTuple):
    """Options for running the steps."""

    small: bool
    device: str
    budget_seconds: float


def run_steps(names: tuple[str, ...], root: Path, output: Path, scratch: Path, prepared: Path, options: Options) -> int:
    """Run the steps; return 0 if none failed."""
    with contextlib.suppress(OSError, AttributeError):  # without glibc only the process group is ended
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of a step become children of this process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("gpu-check: ended by a signal; what was measured is there"))
    started = time.monotonic()
    about: dict[str, Any] = {"started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "machine": {}}
    about |= {"source": source_of(root, prepared), "small": options.small}
    results = Results(output, about | {"budget_seconds": options.budget_seconds, "seconds": 0.0})
    results.write()
    environment = environment_of(root, scratch)
    (output / LOG_FILE).write_text("")
    with (output / LOG_FILE).open("a", buffering=1) as log:
        for name in names:
            left = options.budget_seconds - (time.monotonic() - started)
            if left < LEAST_SECONDS:
                results.put(name, LEFT_OUT, f"{left:.0f} s of the budget were left", 0)
            else:
                command = [
                    *pytest_of(root / "tests/gpu" / f"test_{name}.py", output, options),
                    f"--seconds-left={left}",
                ]
                run_step(name, command, environment, scratch / name, output, log)
            results = Results(output)
            results.content["seconds"] = round(time.monotonic() - started, 1)
            results.write()
            results.write_page()
        tell(log, f"{results.content['seconds']:.0f} s in all; results are in {output}")
        for name, step in results.steps.items():
            tell(log, f"  {step['status']:9} {name}{': ' if step['why'] else ''}{step['why']}")
        if left_out := ",".join(name for name, step in results.steps.items() if step["status"] == LEFT_OUT):
            tell(log, f"for what was left out: scripts/gpu-check --steps {left_out} --output ANOTHER_FOLDER")
    return int(any(step["status"] == FAILED for step in results.steps.values()))


def pytest_of(file: Path, output: Path, options: Options) -> list[str]:
    """Return the command of one step, without the settings of other tests, which import more than a step does."""
    command = [sys.executable, "-u", "-m", "pytest", "-q", "-s", "--noconftest", "-p", "no:cacheprovider"]
    command += ["-p", "gpu_check.plugin", f"--figures={output}", f"--device={options.device}", str(file)]
    return command + (["--small"] if options.small else [])


def run_step(
    name: str, command: list[str], environment: dict[str, str], scratch: Path, output: Path, log: IO[str]
) -> None:
    """Run the process of one step until its end or its limit, and end all processes that it started."""
    tell(log, f"== {name}")
    scratch.mkdir()
    began, deadline, limit = time.monotonic(), time.monotonic() + START_SECONDS, 0.0
    process = subprocess.Popen(
        [*command, f"--basetemp={scratch / 'pytest'}"],
        env=environment | {"TMPDIR": str(scratch)},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        with (output / LOG_FILE).open(errors="replace") as shown:
            shown.seek(0, os.SEEK_END)
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                if not limit and (step := Results(output).steps.get(name)):
                    began, limit = time.monotonic(), step.get("limit_seconds", 0.0)
                    deadline = began + limit + GRACE_SECONDS
                sys.stdout.write(shown.read())
        code = process.poll()
    finally:
        end_all(process)
    seconds, results = time.monotonic() - began, Results(output)
    step = results.steps.get(name, {"status": RUNNING})
    if step["status"] == RUNNING:
        why = f"its process ended with status {code} and no last word; see the log"
        if code is None or (limit and seconds >= limit):
            why = f"killed at its limit of {limit or START_SECONDS:.0f} s; what it measured before is there"
        said = {part: step.get(part) for part in ("shows", "figures", "tables", "checks")}
        results.put(name, FAILED, why, seconds, **said)
    if results.steps[name]["status"] == FAILED:
        tell_logs(log, scratch)
    tell(log, f"== {name}: {results.steps[name]['status']}: {results.steps[name]['why']}".rstrip(": "))
    shutil.rmtree(scratch, ignore_errors=True)


def end_all(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process, its group, and every process that descends from this one, in at most 50 passes."""
    for _ in range(50):  # each pass may reveal orphans of the killed processes
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        children = living_children()
        for pid in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not children and process.poll() is not None:
            return
        time.sleep(0.1)


def living_children() -> list[int]:
    """Return the children of this process. Orphans of a dead child appear in the next call."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX" and int(parent) == os.getpid():
                found.append(int(stat.parent.name))
    return found


def environment_of(root: Path, scratch: Path) -> dict[str, str]:
    """Return the environment: project from the source tree, wheels before installed packages, Hugging Face offline."""
    folders = [str(root / folder) for folder in ("", *FOLDERS)]
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    # Without bytecode every process would compile what it imports; the scratch folder stores it for this run.
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(scratch / "bytecode")}
    return {
        **os.environ,
        **(compiled if os.environ.get("PYTHONDONTWRITEBYTECODE") else {}),
        "PYTHONPATH": ":".join(dict.fromkeys([*folders, str(scratch / "wheels"), *inherited])),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
    }


def tell_logs(log: IO[str], scratch: Path) -> None:
    """Show the ends of the logs of a failed step's processes, before its folder is removed."""
    for path in sorted(scratch.rglob("*.log")):
        tell(log, f"  -- the end of {path.relative_to(scratch)}")
        for line in path.read_text(errors="replace").splitlines()[-LOG_LINES:]:
            tell(log, f"  {line}")


def tell(log: IO[str], line: str) -> None:
    """Write a line to the log, and print it."""
    log.write(line + "\n")
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
