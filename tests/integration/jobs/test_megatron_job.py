"""A real job with Megatron's layers and experts divided over its two ranks: it ends, and kills change no weight."""

from pathlib import Path

import pytest
from tests.support.jobs.chaos import assert_killed_ranks_change_no_weight
from tests.support.jobs.local_job import write_job

pytestmark = pytest.mark.full

SEEDS = {"llama": 20, "mixtral": 21}
"""Seeds of the moments of kills, by family; printed with every kill when the test fails."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("family", "iterations", "every"), [("llama", 6, 2), ("mixtral", 3, 1)])
def test_ranks_killed_once_go_on_from_a_checkpoint_to_the_same_weights(
    family: str, iterations: int, every: int, tmp_path: Path
) -> None:
    manifest = write_job(tmp_path, iterations=iterations, every=every, family=family)
    parallelism = {"pipeline": 1, "data": 2, "expert": 2} if family == "mixtral" else {}
    options = ["--set", "spec.training.backend=megatron"]
    for name, size in parallelism.items():
        options += ["--set", f"spec.training.parallelism.{name}={size}"]
    assert_killed_ranks_change_no_weight(manifest, tmp_path, options, SEEDS[family])
