"""The scale benchmark at a fiftieth of its size: checks that it measures what it claims, not the speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full


ROOT = Path(__file__).parents[3]
PATIENCE = 1800.0  # seconds


def test_every_killed_pod_is_replaced_and_the_last_line_says_so() -> None:
    command = [sys.executable, "benchmarks/operator_scale.py", "--scenario=S5", "--scale=0.02", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["settings"]["scale"] == 0.02
    s5 = said["scenarios"]["S5"]
    assert (s5["pods"], s5["replaced"]) == (20, 10)


def test_a_scenario_that_does_not_exist_is_named() -> None:
    command = [sys.executable, "benchmarks/operator_scale.py", "--scenario=S1,S9"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 2
    assert "--scenario: S9: must be among S1, S2" in done.stderr
