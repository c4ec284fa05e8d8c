"""Reading a manifest for a run: effects of `--set`, checks, and resolution of paths."""

import os
from pathlib import Path
from typing import Any

import pytest

from rlhf_api.problems import ManifestError, Severity
from rlhf_cli.load_job import LoadedJob, Target, load_documents, load_resolved
from rlhf_cli.local.errors import RunError
from rlhf_cli.overrides import apply, parse_value
from rlhf_common.names import ExitCode

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
        ("[2020-01-01, Off]", ["2020-01-01", False]),
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


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """Return a manifest whose files exist."""
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    (tmp_path / "prompts.jsonl").touch()
    path = tmp_path / "job.yaml"
    path.write_text(MANIFEST)
    return path


def load(path: Path, overrides: list[str]) -> LoadedJob:
    return load_resolved(path, overrides, lambda job: path.parent / "runs" / job.name)


def test_overrides_go_through_the_same_checks_as_the_manifest(manifest: Path) -> None:
    overrides = ["spec.iterations=3", "spec.training.optimizer.learningRate=1e-4", "spec.inference.overlap=Disabled"]
    spec = load(manifest, overrides).resolved.spec
    assert (spec.iterations, spec.training.optimizer.learning_rate) == (3, 1e-4)
    assert spec.inference.overlap == "Disabled"
    with pytest.raises(ManifestError) as refused:
        load(manifest, ["spec.iterations=many", "spec.nonsense=1"])
    assert {problem.field for problem in refused.value.problems} == {"spec.iterations", "spec.nonsense"}
    assert all(problem.line is None for problem in refused.value.problems)
    assert "--set spec.iterations=many" in refused.value.source


def test_a_broken_file_is_reported_as_itself(manifest: Path) -> None:
    with pytest.raises(ManifestError, match="cannot be read"):
        load(manifest.parent / "missing.yaml", ["spec.iterations=3"])
    manifest.write_text("spec: [")
    with pytest.raises(ManifestError, match="not valid YAML"):
        load(manifest, ["spec.iterations=3"])
    manifest.write_text(MANIFEST + "kind: RLHFJob\n")
    with pytest.raises(ManifestError, match="occurs twice") as refused:
        load(manifest, ["spec.iterations=3"])
    assert refused.value.source == str(manifest)


def test_a_job_is_resolved_against_the_manifests_folder_and_gets_a_folder_for_checkpoints(manifest: Path) -> None:
    loaded = load(manifest, [])
    spec = loaded.resolved.spec
    assert spec.models.actor.path == str(manifest.parent / "policy")
    assert spec.prompts.path == str(manifest.parent / "prompts.jsonl")
    assert spec.checkpoints is not None
    assert spec.checkpoints.path == str(manifest.parent / "runs" / "tiny" / "checkpoints")
    assert loaded.run_paths.base == manifest.parent
    elsewhere = load(manifest, ["spec.checkpoints={path: kept}"]).resolved.spec.checkpoints
    assert elsewhere is not None
    assert elsewhere.path == str(manifest.parent / "kept")


@pytest.mark.parametrize(
    ("missing", "field", "code"),
    [
        ("prompts.jsonl", "spec.prompts.path", ExitCode.BAD_DATA),
        ("policy/config.json", "spec.models.actor.path", ExitCode.BAD_MODEL),
    ],
)
def test_a_missing_file_is_refused_with_the_exit_code_of_the_job(
    manifest: Path, missing: str, field: str, code: ExitCode
) -> None:
    (manifest.parent / missing).unlink()
    with pytest.raises(RunError, match=field) as refused:
        load(manifest, [])
    assert refused.value.exit_code == code


def test_warnings_do_not_keep_a_job_from_being_run(manifest: Path) -> None:
    loaded = load(manifest, ["spec.training.optimizer.warmupSteps=1000000"])
    (warning,) = loaded.problems
    assert (warning.severity, loaded.errors) == (Severity.WARNING, [])
    assert loaded.resolved.spec.training.optimizer.warmup_steps == 1000000


def test_every_document_of_a_file_is_loaded_for_itself() -> None:
    other = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: reward}\n"
    wrong = MANIFEST.replace("name: tiny", "name: Tiny")
    first, second, third = load_documents("---".join([other, MANIFEST, wrong]), Target.LOCAL)
    assert (first.name, first.of_another_kind, first.job) == ("ConfigMap reward", True, None)
    assert (second.name, second.errors, second.resolved.name) == ("RLHFJob tiny", [], "tiny")
    assert [problem.field for problem in third.errors] == ["metadata.name"]
    with pytest.raises(ManifestError, match=r"metadata\.name"):
        assert third.resolved
    with pytest.raises(ManifestError, match="holds no RLHFJob: it has ConfigMap reward, ConfigMap reward"):
        load_documents("---".join(["\n" + other, "\n" + other]))


def test_a_character_beyond_the_first_plane_survives_an_override(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    message = (
        'spec:\n  seed: 1\n  prompts: {path: p.jsonl, chatTemplate: true, systemMessage: "\U0001f600 \\x80 \\\\ud83d"}'
    )
    path.write_text(MANIFEST.replace("spec:", message, 1).replace("  prompts: {path: prompts.jsonl}\n", ""))
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    (tmp_path / "p.jsonl").write_text("{}")
    loaded = load_resolved(path, ["spec.seed=2"], lambda _: tmp_path)
    assert loaded.resolved.spec.prompts.system_message == "\U0001f600 \x80 \\ud83d"


@pytest.mark.parametrize("written", ['"\\ud83d"', '"\\ud83d\\ude00"'])
def test_half_a_surrogate_pair_in_a_manifest_is_refused_by_field_and_line(written: str) -> None:
    [loaded] = load_documents(MANIFEST + f"  tags: [a, {written}]\n", Target.LOCAL)
    assert [(problem.field, problem.line) for problem in loaded.errors] == [("spec.tags[1]", 9)]
    assert "has half a surrogate pair, which is not text" in loaded.errors[0].message


def test_half_a_surrogate_pair_of_the_command_line_is_refused() -> None:
    with pytest.raises(RunError, match="the value has half a surrogate pair"):
        apply({"spec": {}}, "spec.x=caf\udce9")


def test_a_folder_whose_name_is_not_utf_8_is_refused(manifest: Path) -> None:
    folder = manifest.parent / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    path = manifest.rename(folder / "job.yaml")
    with pytest.raises(RunError, match=r"caf\\udce9: the manifest and its run folder need paths of UTF-8"):
        load(path, [])


@pytest.mark.parametrize("value", ["[1", "[" * 2000, "1" * 5000, '{"a": 1, "a": 2, 3: 4, "b": [}'])
def test_a_value_that_yaml_cannot_hold_is_refused(value: str) -> None:
    with pytest.raises(RunError, match="the value is not valid YAML"):
        apply({"spec": {}}, f"spec.seed={value}")
