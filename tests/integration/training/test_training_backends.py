"""The small comparison of training backends and layouts: every layout trains, with the gradients of one rank."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[3]
SMALL = {
    "hidden": 32, "critic-hidden": 32, "layers": 2, "critic-layers": 2, "prompt": 4, "response": 8,
    "search-seconds": 0.2,
}  # fmt: skip
LAYOUTS = {
    "torch", "torch data 2", "torch data 2 shardOptimizer", "torch pipeline 2", "torch context 2", "torch shard 2",
    "megatron data 2", "megatron pipeline 2", "megatron context 2", "megatron tensor 2",
}  # fmt: skip


@pytest.mark.timeout(600)
def test_all_layouts_take_the_same_step_and_schedules_the_same_bits() -> None:
    asked = [f"--{name}={value}" for name, value in SMALL.items()]
    command = [sys.executable, "-m", "benchmarks.training_backends", "--micro-batch=1", "--rounds=1", "--json", *asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["results"]
    assert {row["layout"] for row in rows} == LAYOUTS
    schedules = ["serial-1f1b", "fused", "fused-split"]
    for backend in ("torch", "megatron"):
        assert [row["schedule"] for row in rows if row["layout"] == f"{backend} pipeline 2"] == schedules
    assert [row for row in rows if row["gradients"] > 1e-5 or not row["same_bits"]] == []
