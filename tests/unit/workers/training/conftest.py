"""Small policies on disk, and a Megatron group, for the tests of a module."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.model_folders import models
from tests.support.training.training_ranks import group_of_one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_policy(tmp_path_factory.mktemp("models") / "qwen2", "qwen2", seed=1)


@pytest.fixture(scope="module")
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Policies of four layers of the module's FAMILIES."""
    root, families = tmp_path_factory.mktemp("models"), request.module.FAMILIES
    return {family: models.write_policy(root / family, family, seed=1, num_hidden_layers=4) for family in families}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied, so that both ends of a pipeline have a copy of the embedding."""
    return models.write_policy(tmp_path_factory.mktemp("model"), "qwen2", seed=1)


@pytest.fixture(scope="module")
def megatron_group() -> Iterator[None]:
    """Ranks that are threads are a Megatron group of one rank."""
    with group_of_one():
        yield
