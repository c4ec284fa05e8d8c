"""A real job whose ranks compute every layer together: it ends, and a rank killed on the way changes no weight."""

from pathlib import Path

import pytest
from tests.support.chaos import assert_killed_ranks_change_no_weight
from tests.support.local_job import write_job

SEED = 22
"""Of the moments of kills; printed with every kill when the test fails."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_killed_once_go_on_from_a_checkpoint_to_the_same_weights(tmp_path: Path) -> None:
    manifest = write_job(tmp_path, iterations=3, every=1)
    sizes = {"pipeline": 1, "tensor": 2}
    options = [part for name, size in sizes.items() for part in ("--set", f"spec.training.parallelism.{name}={size}")]
    options += ["--set", "spec.training.backend=megatron"]
    assert_killed_ranks_change_no_weight(manifest, tmp_path, options, SEED)
