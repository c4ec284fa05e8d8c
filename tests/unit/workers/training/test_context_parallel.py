"""Samples shared by position: gradients, metrics, schedules and checkpoints of ranks that have whole samples."""

from pathlib import Path
from typing import Any

import pytest
from tests.support import models
from tests.support.gradient_comparison import assert_same_gradients
from tests.support.training_ranks import (
    gradients_of,
    make_batch,
    make_job,
    serial,
)

from rlhf_api.job import RLHFJob

TOLERANCE = 1e-5
"""Of the largest number of a tensor: float32 sums in another order."""
FAMILIES = ("llama", "mistral", "gemma2", "qwen3", "mixtral")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    narrow = {"mistral": {"sliding_window": 5}, "gemma2": {"sliding_window": 6}}
    return {
        family: models.write_policy(root / family, family, seed=1, num_hidden_layers=2, **narrow.get(family, {}))
        for family in FAMILIES
    }


def job_of(folder: Path, context: int, **spec: Any) -> RLHFJob:
    """A job whose actor and critic are of one folder, their samples shared by so many ranks."""
    training = spec.pop("training", {})
    parallelism = {"context": context, **training.pop("parallelism", {})}
    return make_job(folder, folder, training={"microBatchSize": 2, "parallelism": parallelism, **training}, **spec)


@pytest.mark.parametrize(
    ("family", "context", "pipeline", "data", "training", "deterministic"),
    [
        ("llama", 2, 1, 1, {}, True),
        ("llama", 2, 1, 1, {}, False),
        ("qwen3", 4, 1, 1, {"packing": True}, False),
        ("mistral", 2, 2, 1, {"packing": True}, True),
        ("mistral", 4, 1, 1, {}, False),
        ("gemma2", 2, 1, 2, {"activationCheckpointing": True}, True),
        ("qwen3", 2, 2, 2, {"packing": True, "activationCheckpointing": True}, False),
        ("mixtral", 2, 1, 1, {"parallelism": {"expert": 2}}, True),
        ("mixtral", 2, 1, 2, {"packing": True, "parallelism": {"data": 2, "expert": 4}}, True),
    ],
)
def test_gradients_are_those_of_one_rank(
    family: str,
    context: int,
    pipeline: int,
    data: int,
    training: dict[str, Any],
    deterministic: bool,
    folders: dict[str, Path],
) -> None:
    folder, batch = folders[family], make_batch(abstained=(3,))
    plain = make_job(folder, folder)
    expected = gradients_of(plain, serial(plain, 1, 1), 1, batch)
    job = job_of(folder, context, training=training, deterministic=deterministic)
    got = gradients_of(job, serial(job, pipeline, data), pipeline * data * context, batch)
    assert_same_gradients(got, expected, TOLERANCE)
