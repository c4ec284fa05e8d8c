"""`scripts/gpu-check --small` runs every step on a CPU, so that each still works when a GPU is available."""

import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.full


ROOT = Path(__file__).resolve().parents[3]
BUDGET_SECONDS = 3600
"""Generous time limit in seconds: no test relies on speed; the file has the real time."""


@pytest.mark.timeout(BUDGET_SECONDS + 100)
def test_every_step_passes_in_small_or_says_why_it_is_not_for_a_cpu(tmp_path: Path) -> None:
    options = ["--small", "--device", "cpu", "--budget-seconds", str(BUDGET_SECONDS)]
    folders: list[str | Path] = ["--output", tmp_path / "out", "--prepared", tmp_path / "nothing-prepared"]
    # Steps have two cores: more threads of torch would only wait for each other.
    ran = subprocess.run(
        [ROOT / "scripts" / "gpu-check", *options, *folders],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUDGET_SECONDS + 60,
    )
    assert ran.returncode == 0, ran.stdout[-10000:]
    results = json.loads((tmp_path / "out" / "gpu-check.json").read_text())
    ended = {name: (step["status"], step["why"]) for name, step in results["steps"].items()}
    listed = subprocess.run([ROOT / "scripts" / "gpu-check", "--list"], capture_output=True, text=True, check=True)
    assert list(ended) == listed.stdout.split()
    for name, (status, why) in ended.items():
        assert status == "passed" or (status == "not here" and why), (name, status, why)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "gpu-check.json",
        "gpu-check.log",
        "gpu-check.md",
    ]
