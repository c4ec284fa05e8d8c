"""The page about rollout mechanisms lists exactly the pairs that validation refuses."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.manifests.manifest_cases import changed_data

from rlhf_api import manifest
from rlhf_api.manifest import ManifestError

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "choose-a-rollout-mechanism.md"
OVERSAMPLED = {"spec.rollout.oversample": 8}
MECHANISMS: dict[str, dict[str, Any]] = {
    "fusion.interStage": {"spec.fusion.interStage.mode": "Auto"},
    "generation.speculation": {"spec.generation.speculation": {"mode": "Auto", "drafters": ["Siblings", "Ngram"]}},
    "inference.incremental": {"spec.inference.incremental": "Auto"},
    "training.sharedPrompts": {"spec.training.packing": True, "spec.training.sharedPrompts": "Auto"},
    "rollout.oversample": OVERSAMPLED,
    "rollout.longRounds": OVERSAMPLED | {"spec.rollout.longRounds": "Enabled"},
    "prompts.lengthWindow": {"spec.prompts.lengthWindow": 5},
    "rollout.maxStaleness": OVERSAMPLED | {"spec.rollout.maxStaleness": 1},
    "rollout.overlapTraining": {"spec.rollout.overlapTraining": "Enabled"},
    "generation.speculation.ahead": {"spec.generation.speculation": {"mode": "Auto", "ahead": "Auto"}},
    "training.stream": {
        "spec.training.stream": "Enabled",
        "spec.training.parallelism.pipeline": 1,
        "spec.algorithm.grpo.miniBatchSize": 32,
        "spec.rollout.batchSize": 32,
    },
}
"""Field on the page -> the settings that switch the mechanism on."""


def listed_pairs() -> set[frozenset[str]]:
    """Return the pairs of mechanisms in the page's table of refused pairs."""
    rows = re.findall(r"^\| `([\w.]+)` \| `([\w.]+)` \| .+ \|$", PAGE.read_text(), re.MULTILINE)
    return {frozenset(row) for row in rows}


def refused(settings: dict[str, Any]) -> list[str]:
    """Return the fields with errors in a GRPO job with these settings."""
    try:
        manifest.parse(yaml.safe_dump(changed_data("grpo", {"spec.deterministic": False} | settings, [])))
    except ManifestError as error:
        return [problem.field for problem in error.problems]
    return []


@pytest.mark.parametrize("pair", list(itertools.combinations(MECHANISMS, 2)), ids=" and ".join)
def test_the_page_lists_a_pair_exactly_if_it_is_refused(pair: tuple[str, str]) -> None:
    settings = MECHANISMS[pair[0]] | MECHANISMS[pair[1]]
    assert bool(refused(settings)) == (frozenset(pair) in listed_pairs())


def test_the_page_lists_a_conflict_of_chosen_long_rounds_and_a_given_number() -> None:
    assert "spec.rollout.oversample" in refused(OVERSAMPLED | {"spec.rollout.longRounds": "Auto"})
    assert "| `rollout.longRounds: Auto` | `rollout.oversample` |" in PAGE.read_text()


def test_drafts_from_cut_samples_need_long_rounds_and_siblings() -> None:
    drafts = {"spec.rollout.keepCut": "Drafts"}
    assert refused(drafts) == ["spec.rollout.keepCut"]
    assert refused(drafts | MECHANISMS["rollout.longRounds"] | MECHANISMS["generation.speculation"]) == []
    no_siblings = {"spec.generation.speculation": {"mode": "Auto", "drafters": ["Ngram"]}}
    assert refused(drafts | MECHANISMS["rollout.longRounds"] | no_siblings) == ["spec.rollout.keepCut"]
