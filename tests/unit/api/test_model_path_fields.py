"""Errors name the manifest field of the folder that a model starts from."""

from typing import Any

import pytest

from rlhf_api.job.models import Models

MODEL = {"model": {"path": "/judge"}}


@pytest.mark.parametrize(
    ("model", "models", "field"),
    [
        ("actor", {}, "spec.models.actor.path"),
        ("critic", {"critic": {"path": "/critic"}}, "spec.models.critic.path"),
        ("critic", {}, "spec.models.actor.path"),
        ("reward", {"reward": MODEL}, "spec.models.reward.model.path"),
        ("reward", {"rewards": [{"name": "a", **MODEL}]}, "spec.models.rewards[0].model.path"),
        ("reward", {}, "spec.models.actor.path"),
        ("cost_critic", {"costCritic": {"path": "/critic"}}, "spec.models.costCritic.path"),
        ("draft", {}, "spec.generation.speculation.draftModel.path"),
    ],
)
def test_the_field_of_a_model_is_the_one_that_its_folder_has(model: str, models: dict[str, Any], field: str) -> None:
    assert Models.model_validate({"actor": {"path": "/policy"}, **models}).path_field(model) == field


def test_a_name_that_is_no_model_has_no_field() -> None:
    with pytest.raises(ValueError, match="judge"):
        Models.model_validate({"actor": {"path": "/policy"}}).path_field("judge")
