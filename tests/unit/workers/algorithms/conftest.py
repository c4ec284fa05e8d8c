"""A small policy on disk for a module's tests."""

from pathlib import Path

import pytest
from tests.support.model_folders import models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_policy(tmp_path_factory.mktemp("model"), "llama", seed=1)
