"""The process of one step: `python -m gpu_check.step_process run NAME REQUEST`, or `describe` for what there is.

Rule: a step speaks through its report file; this process adds how it ended. It dies with the runner.
"""

import contextlib
import ctypes
import json
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from gpu_check.find_machine import find_machine
from gpu_check.registry import ORDER, load
from gpu_check.step import CheckedMachine, NotHereError, Report, write_whole

PR_SET_PDEATHSIG = 1


def describe(device: str, names: list[str]) -> dict[str, Any]:
    """Return what the runner must know: the machine, and every step or why it cannot be loaded."""
    steps: list[dict[str, Any]] = []
    for name in names:
        try:
            steps.append(load(name).described())
        except Exception as error:
            steps.append({"name": name, "broken": f"{type(error).__name__}: {error}"})
    return {"machine": find_machine(device), "steps": steps}


def run(name: str, request: dict[str, Any]) -> None:
    """Runs one step. `request`: the fields of `CheckedMachine`, and `report`, the file to write to."""
    path = Path(request.pop("report"))
    request["scratch"] = Path(request["scratch"])
    report = Report(path)
    ended: dict[str, Any] = {"ended": "done"}
    try:
        machine = CheckedMachine(**request)
        step = load(name)
        step.run(machine, step.sizes(machine.small), report)
    except NotHereError as why:
        ended = {"ended": "not here", "why": str(why)}
    except Exception as error:
        traceback.print_exc()
        ended = {"ended": "raised", "why": f"{type(error).__name__}: {error}"}
    write_whole(path, json.dumps(report.as_json() | ended))


def main() -> None:
    """Reads the request from the command line."""
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if sys.argv[1] == "describe":
        device, output = sys.argv[2:4]
        write_whole(Path(output), json.dumps(describe(device, sys.argv[4:] or list(ORDER))))
    else:
        run(sys.argv[2], json.loads(Path(sys.argv[3]).read_text()))


if __name__ == "__main__":
    main()
