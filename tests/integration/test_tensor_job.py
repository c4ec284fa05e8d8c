"""Real jobs whose ranks compute every layer together, or share their moments out: they end, and a rank killed on the
way changes no weight."""

from pathlib import Path

import pytest
from tests.support.chaos import assert_killed_ranks_change_no_weight
from tests.support.local_job import write_job

SEED = 22
"""Of the moments of kills; printed with every kill when the test fails."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("backend", "parallelism"),
    [
        ("megatron", {"pipeline": 1, "tensor": 2}),
        ("megatron", {"pipeline": 1, "tensor": 2, "sequenceParallel": "Enabled"}),
        ("megatron", {"pipeline": 1, "tensor": 2, "criticTensor": 1}),
        ("megatron", {"pipeline": 2, "tensor": 1, "criticTensor": 2}),
        ("torch", {"pipeline": 1, "data": 2, "shardOptimizer": "true"}),
    ],
)
def test_ranks_killed_once_go_on_from_a_checkpoint_to_the_same_weights(
    backend: str, parallelism: dict[str, object], tmp_path: Path
) -> None:
    manifest = write_job(tmp_path, iterations=3, every=1)
    chosen = {f"parallelism.{name}": value for name, value in parallelism.items()} | {"backend": backend}
    options = [part for name, value in chosen.items() for part in ("--set", f"spec.training.{name}={value}")]
    assert_killed_ranks_change_no_weight(manifest, tmp_path, options, SEED)
