"""The unit tests of the workers with the libraries of this machine.

They run on the CPU: they show that the project works with these versions of torch and transformers. A test that fails
because a library is not installed is counted separately; other failures fail the step.
"""

import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Final

import pytest

from gpu_check.plugin import CheckedMachine, Figures

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = "tests/unit/workers"
SHOWN: Final = 20
"""Number of failures whose names are shown."""
LIBRARIES: Final = ("megatron", "vllm", "peft")
"""Libraries that a bare machine need not have."""
ABSENT: Final = (
    "No package metadata was found for rlhf-operator",
    "Found no NVIDIA driver on your system",
    "No CUDA GPUs are available",
)
"""Further messages of tests that lack something because they run from the source tree with a hidden GPU."""


@pytest.mark.gpu(seconds=150)
def test_tests(machine: CheckedMachine, figures: Figures) -> None:
    """The unit tests of the workers pass with the libraries of this machine."""
    few = [f"{FOLDER}/test_shared_device.py", f"{FOLDER}/test_worker_settings.py"]
    results, processes = machine.scratch / "results.xml", machine.sized(1, min(12, machine.cores))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={results}"]
    command += machine.sized(few, [FOLDER])
    if processes > 1 and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(processes), "--dist", "loadfile"]
    figures.say(" ".join(command))
    # Without a GPU, which would only change their results, and with one thread each, because there are many of them.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=False)
    assert results.exists(), "pytest wrote no results; its output is in the log"
    cases = list(ElementTree.parse(results).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    wrong = [case for case in failed if not lacks(case)]
    figures.add("tests", len(cases))
    figures.add("tests that need what is not installed", len(failed) - len(wrong))
    figures.add("seconds of all tests", sum(float(case.get("time", 0)) for case in cases), "s, of all processes")
    named = ", ".join(f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}" for case in wrong[:SHOWN])
    figures.check("all tests pass", bool(cases) and not wrong, f"{len(wrong)} of {len(cases)} fail: {named or 'none'}")


def lacks(case: ElementTree.Element) -> bool:
    """Return whether a test failed because this machine lacks something."""
    said = "".join((part.get("message") or "") + (part.text or "") for part in case if part.tag in ("failure", "error"))
    absent = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    return any(f"No module named '{name}" in said for name in absent) or any(text in said for text in ABSENT)
