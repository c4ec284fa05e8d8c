"""Valid manifests are accepted as kubectl would send them, survive a round trip, and resolve into explicit jobs."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.manifests.manifest_cases import EXAMPLES, changed

from rlhf_api.algorithms.fields import PolicyGradientFields
from rlhf_api.algorithms.ppo import PPO
from rlhf_api.job import RLHFJob
from rlhf_api.manifest import ManifestError, broken_rules, dump, forbidden_changes, parse, parse_stored, resolve
from rlhf_api.rules.table import IMMUTABLE, LAYOUT
from rlhf_api.structural_schema import job_schema, with_defaults
from rlhf_api.yaml_document import read_document

EXAMPLE_FILES = sorted(EXAMPLES.glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLE_FILES, ids=lambda path: path.name)
def test_examples_validate_in_forty_lines(path: Path) -> None:
    text = path.read_text()
    (job,) = [parse(item) for item in text.split("---\n") if "kind: RLHFJob" in item]
    assert broken_rules(job) == []
    assert len(text.splitlines()) <= 40


@pytest.mark.parametrize("example", ["ppo", "grpo"])
def test_an_object_as_the_api_server_stores_it_is_the_job_of_its_text(example: str) -> None:
    text = changed(example, {"spec.checkpoints": None}, [])
    assert parse_stored(json.loads(json.dumps(read_document(text).data))) == parse(text)
    with pytest.raises(ManifestError, match=r"spec\.iterations"):
        parse_stored(read_document(changed(example, {"spec.iterations": "many"}, [])).data)


@pytest.mark.parametrize("example", ["ppo", "grpo"])
def test_round_trip_keeps_every_field(example: str) -> None:
    job = parse(changed(example, {"spec.training.optimizer.maxGradientNorm": 0}, []))
    assert job.spec.training.optimizer.max_gradient_norm is None
    assert RLHFJob.model_validate(dump(job)) == job
    assert RLHFJob.model_validate(job.model_dump(exclude_none=True)) == job
    assert RLHFJob.model_validate(job.model_dump(by_alias=True)) == job
    assert RLHFJob.model_validate_json(job.model_dump_json(by_alias=True)) == job
    assert parse(yaml.safe_dump(dump(job))) == job


@pytest.mark.parametrize("example", ["ppo", "grpo"])
def test_defaults_of_schema_and_models_agree(example: str) -> None:
    text = changed(example, {}, ["spec.rollout", "spec.generation", "spec.checkpoints", "spec.runPolicy"])
    document = yaml.safe_load(text)
    assert with_defaults(document, job_schema()) == dump(parse(text))


@pytest.mark.parametrize(
    ("path", "value", "attribute"),
    [
        ("spec.algorithm.ppo.valueClipRange", 0, None),
        ("spec.algorithm.ppo.valueClipRange", None, 0.2),  # null is pruned, so the default comes back
        ("spec.algorithm.ppo.valueClipRange", 1, 1.0),
    ],
)
def test_zero_turns_off_and_null_is_unset(path: str, value: float | None, attribute: float | None) -> None:
    fields = parse(changed("ppo", {path: value}, [])).spec.algorithm.fields
    assert isinstance(fields, PPO)
    assert fields.value_clip_range == attribute


def test_yaml_is_read_as_kubectl_reads_it() -> None:
    text = changed("ppo", {"spec.generation.engineArgs": "HERE", "spec.training.optimizer.learningRate": "RATE"}, [])
    text = text.replace("HERE", "{date: 2026-01-01, time: 1:30, base: &b {x: 1}, more: {<<: *b, z: 2}}").replace(
        "RATE", "1e-6"
    )
    job = parse(text)
    assert job.spec.training.optimizer.learning_rate == 1e-6
    assert job.spec.generation.engine_args == {
        "date": "2026-01-01",
        "time": "1:30",
        "base": {"x": 1},
        "more": {"x": 1, "z": 2},
    }


def test_scalars_mean_what_they_mean_to_kubectl() -> None:
    text = (
        "{a: y, b: Off, c: 2026-01-01, d: 1:30, e: 0o17, f: 1_000, g: 1e-6, h: 017, i: 0x1F, j: .5, k: 1., l: +3, "
        "m: ~, o: 0b11, q: 1_0.5, r: 2026-01-01T00:00:00Z, s: 09, t: n, u: 1e3, v: -0, w: , x: None, z: '7'}"
    )
    # As `kubectl create --dry-run=client -o json` of Kubernetes 1.36 prints them.
    wanted = {
        "a": True, "b": False, "c": "2026-01-01", "d": "1:30", "e": 15, "f": 1000, "g": 0.000001, "h": 15, "i": 31,
        "j": 0.5, "k": 1, "l": 3, "m": None, "o": 3, "q": 10.5, "r": "2026-01-01T00:00:00Z", "s": 9, "t": False,
        "u": 1000, "v": 0, "w": None, "x": "None", "z": "7",
    }  # fmt: skip
    data = read_document(text).data
    assert data == wanted
    assert {key: type(value) for key, value in data.items()} == {key: type(value) for key, value in wanted.items()}


def test_status_of_an_exported_job_is_ignored() -> None:
    job = parse(changed("ppo", {"status": {"fromTheFuture": 1}}, []))
    assert job.status is None


def test_pod_templates_and_engine_arguments_pass_through() -> None:
    template = {"spec": {"nodeSelector": {"gpu": "h200"}, "containers": [{"name": "worker", "image": "x"}]}}
    job = parse(
        changed("ppo", {"spec.generation.template": template, "spec.generation.engineArgs": {"any_name": 1}}, [])
    )
    assert job.spec.generation.template == template
    assert job.spec.generation.engine_args == {"any_name": 1}


def test_suspended_job_may_have_no_workers() -> None:
    job = parse(changed("ppo", {"spec.suspend": True, "spec.generation.replicas": 0, "spec.inference.replicas": 0}, []))
    assert job.spec.suspend


def test_resolve_makes_paths_absolute_and_roles_explicit(tmp_path: Path) -> None:
    (tmp_path / "models" / "policy").mkdir(parents=True)
    text = changed(
        "ppo",
        {
            "spec.models.actor.path": "models/policy",
            "spec.prompts.path": "../data/prompts.jsonl",
            "spec.prompts.chatTemplate": True,
            "spec.prompts.chatTemplateFile": "chat.jinja",
            "spec.checkpoints.path": "checkpoints",
            "spec.models.reward.function.file": "./reward.py",
        },
        ["spec.models.critic", "spec.training.optimizer.criticLearningRate"],
    )
    job = resolve(parse(text), tmp_path)
    actor = str(tmp_path / "models/policy")
    assert dump(job)["spec"]["models"] == {
        "actor": {"path": actor},
        "critic": {"path": actor},
        "reference": {"path": actor},
        "reward": {
            "function": {"file": str(tmp_path / "reward.py"), "name": "score", "env": []},
            "timeoutSeconds": 60,
            "retries": 2,
            "onFailure": "Fail",
            "calls": "Sample",
            "batchSize": 32,
        },
    }
    assert job.spec.prompts.path == str(tmp_path.parent / "data/prompts.jsonl")
    assert job.spec.prompts.chat_template_file == str(tmp_path / "chat.jinja")
    assert job.spec.checkpoints is not None
    assert job.spec.checkpoints.path == str(tmp_path / "checkpoints")
    assert job.spec.training.optimizer.critic_learning_rate == 9e-6
    fields = job.spec.algorithm.fields
    assert isinstance(fields, PolicyGradientFields)
    assert fields.clip_range_high == fields.clip_range
    assert resolve(job, Path("/elsewhere")) == job
    assert broken_rules(job) == []


def test_resolve_leaves_hub_ids_alone(tmp_path: Path) -> None:
    text = changed("grpo", {"spec.models.actor.path": "owner/policy-7b"}, [])
    job = resolve(parse(text), tmp_path)
    assert job.spec.models.actor.path == "owner/policy-7b"
    assert job.spec.models.reference is not None
    assert job.spec.models.reference.path == "owner/policy-7b"
    assert job.spec.models.critic is None


@pytest.mark.parametrize(
    ("path", "resolved"), [("drafts/small", "{base}/drafts/small"), ("owner/small", "owner/small")]
)
def test_resolve_treats_the_path_of_a_draft_model_as_that_of_other_models(
    tmp_path: Path, path: str, resolved: str
) -> None:
    (tmp_path / "drafts" / "small").mkdir(parents=True)
    speculation = {"spec.generation.speculation": {"drafters": ["Model"], "draftModel": {"path": path}}}
    job = resolve(parse(changed("ppo", speculation, [])), tmp_path)
    assert job.spec.generation.speculation.draft_model is not None
    assert job.spec.generation.speculation.draft_model.path == resolved.format(base=tmp_path)


def test_reference_is_not_made_up_without_a_kl_term(tmp_path: Path) -> None:
    job = resolve(parse(changed("ppo", {"spec.algorithm.ppo.klCoefficient": 0}, [])), tmp_path)
    assert job.spec.models.reference is None


def test_the_algorithm_alone_may_be_changed_and_models_it_does_not_need_are_left_out(tmp_path: Path) -> None:
    job = resolve(parse(changed("grpo", {"spec.models.critic": {"path": "/models/critic"}}, [])), tmp_path)
    assert job.spec.models.critic is None


def test_changes_names_what_may_not_change() -> None:
    old = parse(changed("ppo", {}, []))
    allowed = {"spec.iterations": 200, "spec.suspend": True, "spec.generation.replicas": 2, "spec.checkpoints.every": 5}
    assert forbidden_changes(old, parse(changed("ppo", allowed, []))) == []
    new = parse(changed("ppo", {"spec.seed": 8, "spec.training.optimizer.learningRate": 1e-5}, ["spec.checkpoints"]))
    assert next(str(problem) for problem in forbidden_changes(old, new)) == (
        "spec.seed = 8: cannot be changed in an existing job: set it back, or create a new job (it was 7)"
    )
    assert [problem.field for problem in forbidden_changes(old, new)] == [
        "spec.seed",
        "spec.training.optimizer",
        "spec.checkpoints.path",
    ]


def test_a_run_that_ended_may_go_on_by_another_layout_of_ranks_and_nothing_else() -> None:
    assert set(LAYOUT) < set(IMMUTABLE)
    old = parse(changed("ppo", {}, []))
    layout = {"spec.training.microBatchSize": 2, "spec.training.packing": True}
    new = parse(changed("ppo", {**layout, "spec.seed": 8}, []))
    assert [problem.field for problem in forbidden_changes(old, new)] == ["spec.seed", *layout]
    assert [problem.field for problem in forbidden_changes(old, new, ended=True)] == ["spec.seed"]


def test_a_suspended_job_takes_another_layout_of_ranks() -> None:
    def job(**more: Any) -> RLHFJob:
        return parse(changed("ppo", {f"spec.{field}": value for field, value in more.items()}, []))

    other = {"training.microBatchSize": 2}
    suspended = job(suspend=True)
    assert forbidden_changes(suspended, job(suspend=True, **other)) == []
    for before, after in ((job(), job(**other)), (suspended, job(**other)), (job(), job(suspend=True, **other))):
        (problem,) = forbidden_changes(before, after)
        assert str(problem).startswith("spec.training.microBatchSize = 2: can be changed in a suspended job only")


def test_job_built_in_python_is_checked_by_the_same_rules() -> None:
    job = parse(changed("ppo", {}, []))
    rollout = job.spec.rollout.model_copy(update={"batch_size": 100})
    wrong = job.model_copy(update={"spec": job.spec.model_copy(update={"rollout": rollout})})
    assert [problem.field for problem in broken_rules(wrong)] == ["spec.rollout.batchSize"]
    with pytest.raises(ManifestError):
        parse(yaml.safe_dump(dump(wrong)))
