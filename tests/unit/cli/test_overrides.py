"""What `--set` does to a manifest."""

from pathlib import Path
from typing import Any

import pytest

from rlhf_api.problems import ManifestError
from rlhf_cli.local.errors import RunError
from rlhf_cli.overrides import apply, load, parse_value

MANIFEST = """
apiVersion: rlhf.dev/v1alpha1
kind: RLHFJob
metadata: {name: tiny}
spec:
  algorithm: {grpo: {}}
  models: {actor: {path: policy}, reward: {function: {module: rewards}}}
  prompts: {path: prompts.jsonl}
"""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("-3", -3),
        ("1e-6", 1e-6),
        (".5", 0.5),
        ("true", True),
        ("null", None),
        ("Disabled", "Disabled"),
        ("no", "no"),
        ("assets/policy", "assets/policy"),
        ("[a, 2]", ["a", 2]),
        ("{grpo: {groupSize: 4}}", {"grpo": {"groupSize": 4}}),
        ('"5"', "5"),
        ("", ""),
    ],
)
def test_values_are_what_a_person_means(text: str, value: Any) -> None:
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


def test_fields_are_set_made_and_removed_without_touching_the_original() -> None:
    data = {"spec": {"seed": 1, "rollout": None}}
    assert apply(data, "spec.rollout.batchSize=4") == {"spec": {"seed": 1, "rollout": {"batchSize": 4}}}
    assert apply(data, "spec.seed=null") == {"spec": {"rollout": None}}
    assert data == {"spec": {"seed": 1, "rollout": None}}


@pytest.mark.parametrize("override", ["spec.seed", "seed=1", "=1", "spec=1", "spec..seed=1", "status.phase=x"])
def test_what_is_no_path_is_refused(override: str) -> None:
    with pytest.raises(RunError, match="give a field and a value"):
        apply({"spec": {}}, override)


def test_a_path_through_a_value_is_refused() -> None:
    with pytest.raises(RunError, match=r"spec\.seed is no mapping"):
        apply({"spec": {"seed": 1}}, "spec.seed.more=1")


def test_overrides_go_through_the_same_checks_as_the_manifest(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(MANIFEST)
    job = load(
        path, ["spec.iterations=3", "spec.training.optimizer.learningRate=1e-4", "spec.inference.overlap=Disabled"]
    )
    assert (job.spec.iterations, job.spec.training.optimizer.learning_rate) == (3, 1e-4)
    assert job.spec.inference.overlap == "Disabled"
    with pytest.raises(ManifestError) as refused:
        load(path, ["spec.iterations=many", "spec.nonsense=1"])
    assert {problem.field for problem in refused.value.problems} == {"spec.iterations", "spec.nonsense"}
    assert all(problem.line is None for problem in refused.value.problems)
    assert "--set spec.iterations=many" in refused.value.source


def test_a_broken_file_is_reported_as_itself(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("spec: [")
    with pytest.raises(ManifestError, match="not valid YAML"):
        load(path, ["spec.iterations=3"])
    with pytest.raises(ManifestError, match="cannot be read"):
        load(tmp_path / "missing.yaml", ["spec.iterations=3"])
