"""Real jobs whose ranks compute every layer together, divide their moments, or store them in host memory.

They complete, and a killed rank changes no weight.
"""

from pathlib import Path

import pytest
from tests.support.jobs.chaos import assert_killed_ranks_change_no_weight, lines
from tests.support.jobs.local_job import write_job

pytestmark = pytest.mark.full

HELD = "training/train/host_optimizer_bytes"
SEED = 22
"""Seed of the moments of kills; printed with every kill when the test fails."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("backend", "parallelism"),
    [
        ("megatron", {"pipeline": 1, "tensor": 2}),
        ("megatron", {"pipeline": 1, "tensor": 2, "criticTensor": 1, "sequenceParallel": "Enabled"}),
        ("megatron", {"pipeline": 2, "tensor": 1, "criticTensor": 2}),
        ("torch", {"pipeline": 1, "data": 2, "shardOptimizer": "true"}),
    ],
)
def test_ranks_killed_once_go_on_from_a_checkpoint_to_the_same_weights(
    backend: str, parallelism: dict[str, object], tmp_path: Path
) -> None:
    manifest = write_job(tmp_path, iterations=3, every=1)
    assert_killed_ranks_change_no_weight(manifest, tmp_path, options_of(backend, parallelism), SEED)


@pytest.mark.timeout(900)
def test_ranks_with_moments_in_host_memory_killed_once_end_with_the_weights_of_moments_on_the_device(
    tmp_path: Path,
) -> None:
    manifest = write_job(tmp_path, iterations=3, every=1)
    options = options_of("torch", {"pipeline": 1, "data": 2, "shardOptimizer": "true"})
    host = ["--set", "spec.training.parallelism.offloadOptimizer=true"]
    assert_killed_ranks_change_no_weight(manifest, tmp_path, options, SEED, otherwise=host)
    bytes_on_host = [line[HELD] for line in lines(tmp_path / "killed")]
    assert len(bytes_on_host) == 3
    assert bytes_on_host[0] == bytes_on_host[1] == bytes_on_host[2] > 0
    assert not any(HELD in line for line in lines(tmp_path / "undisturbed"))


def options_of(backend: str, parallelism: dict[str, object]) -> list[str]:
    chosen = {f"parallelism.{name}": value for name, value in parallelism.items()} | {"backend": backend}
    return [part for name, value in chosen.items() for part in ("--set", f"spec.training.{name}={value}")]
