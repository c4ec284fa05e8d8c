"""Experts shared out over data parallel ranks: gradients, metrics, schedules and checkpoints of ranks that hold all."""

from pathlib import Path
from typing import Any

import pytest
from tests.support import models
from tests.support.gradient_comparison import assert_same_gradients
from tests.support.training_ranks import gradients_of, make_batch, make_job, serial

from rlhf_api.job import RLHFJob
from rlhf_workers.experts import FAMILIES

TOLERANCE = 1e-5
"""Of the largest number of a tensor: float32 sums in another order."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: models.write_policy(root / family, family, seed=1, num_hidden_layers=2) for family in FAMILIES}


def job_of(folder: Path, expert: int, **training: Any) -> RLHFJob:
    parallelism = {"data": expert, "expert": expert, **training.pop("parallelism", {})}
    return make_job(folder, folder, training={"microBatchSize": 1, "parallelism": parallelism, **training})


@pytest.mark.parametrize(
    ("family", "expert", "pipeline", "data", "training"),
    [
        ("mixtral", 2, 1, 2, {}),
        ("qwen3_moe", 4, 1, 4, {"packing": True}),
        ("qwen3_moe", 2, 2, 2, {"activationCheckpointing": True}),
        ("mixtral", 2, 2, 4, {"packing": True, "activationCheckpointing": True}),
    ],
)
def test_gradients_are_those_of_one_rank(
    family: str, expert: int, pipeline: int, data: int, training: dict[str, Any], folders: dict[str, Path]
) -> None:
    folder, batch = folders[family], make_batch(abstained=(3,))
    plain = make_job(folder, folder)
    expected = gradients_of(plain, serial(plain, 1, 1), 1, batch)
    job = job_of(folder, expert, **training)
    got = gradients_of(job, serial(job, pipeline, data), pipeline * data, batch)
    assert_same_gradients(got, expected, TOLERANCE)
