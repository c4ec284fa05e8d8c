"""The unit tests of the workers with the libraries of this machine, which no CI has.

Rule: in their own processes, with nothing written beside the sources. They run on the CPU here as everywhere: what they
show is that the project works with these versions of torch and transformers. A test that fails for want of a library
that is not installed is counted apart, and never one that fails for another reason.
"""

import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from gpu_check.step import CheckedMachine, CheckStep, NotHereError, Report

ROOT = Path(__file__).resolve().parents[3]
SHOWN = 20
"""Failures whose names are shown."""
LIBRARIES = ("megatron", "vllm", "peft")
"""Which a bare machine need not have."""
ABSENT = (
    "No package metadata was found for rlhf-operator",
    "Found no NVIDIA driver on your system",
    "No CUDA GPUs are available",
)
"""What else a test lacks that runs from the source tree, its GPU hidden from it."""


@dataclass(frozen=True)
class SelectedTests:
    """Which tests."""

    paths: tuple[str, ...]
    processes: int


def run(machine: CheckedMachine, sizes: SelectedTests, report: Report) -> None:
    """Runs pytest and counts."""
    if importlib.util.find_spec("pytest") is None:
        raise NotHereError("pytest is not installed")
    results = machine.scratch / "results.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={results}", *sizes.paths]
    processes = min(sizes.processes, machine.cores)
    if processes > 1 and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(processes), "--dist", "loadfile"]
    report.say(" ".join(command))
    # Without a GPU, which would only change what they see, and a thread each, as there are many of them.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if not results.exists():
        report.check("pytest ran", False, "it wrote no results; its output is in the log")
        return
    cases = list(ElementTree.parse(results).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    wrong = [case for case in failed if not lacks(case)]
    report.figure("tests", len(cases))
    report.figure("tests that need what is not installed", len(failed) - len(wrong))
    report.figure("seconds of all tests", sum(float(case.get("time", 0)) for case in cases), "s, of all processes")
    named = ", ".join(f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}" for case in wrong[:SHOWN])
    report.check("all tests pass", bool(cases) and not wrong, f"{len(wrong)} of {len(cases)} fail: {named or 'none'}")


def lacks(case: ElementTree.Element) -> bool:
    """Return whether a test failed for want of what this machine does not have."""
    said = "".join((part.get("message") or "") + (part.text or "") for part in case if part.tag in ("failure", "error"))
    absent = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    return any(f"No module named '{name}" in said for name in absent) or any(text in said for text in ABSENT)


STEP = CheckStep(
    "tests",
    "the unit tests of the workers pass with the libraries of this machine",
    run,
    small=SelectedTests(("tests/unit/workers/test_shared_device.py", "tests/unit/workers/test_worker_settings.py"), 1),
    gpu=SelectedTests(("tests/unit/workers",), 12),
    limit_seconds=150,
)
