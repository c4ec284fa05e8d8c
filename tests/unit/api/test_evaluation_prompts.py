"""Evaluation prompts inherit settings of the job's prompts, in the manifest and in the resolved job."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.manifests.manifest_cases import changed_data

from rlhf_api import manifest
from rlhf_api.job import RLHFJob
from rlhf_api.job.evaluation import INHERITED, EvaluationPrompts, HeldOutPrompts
from rlhf_api.job.rollout import Prompts

JOB = {
    "path": "/data/train.jsonl",
    "promptKey": "question",
    "columns": ["words"],
    "overlong": "Filter",
    "chatTemplate": True,
    "chatTemplateFile": "/data/chat.jinja",
    "chatTemplateArguments": {"enable_thinking": False},
    "systemMessage": "Be brief.",
}
HELD_OUT = {"path": "/data/held-out.jsonl"}
ORDER = {"shuffle": True, "lengthWindow": 0}
"""Fields of the order, which evaluations ignore."""


def job_with(prompts: dict[str, Any], evaluated: dict[str, Any]) -> RLHFJob:
    """Return a checked job with these prompts, and these of its evaluation."""
    data = changed_data("ppo", {}, [])
    data["spec"] |= {"prompts": prompts, "evaluation": {"prompts": evaluated}}
    return manifest.parse(yaml.safe_dump(data))


def resolved(prompts: dict[str, Any], evaluated: dict[str, Any]) -> dict[str, Any]:
    """Return the evaluation's prompts of a resolved job, as in a run folder."""
    job = manifest.resolve(job_with(prompts, evaluated), Path("/"))
    assert manifest.resolve(job, Path("/")) == job
    assert manifest.parse(yaml.safe_dump(manifest.dump(job))) == job, "whoever reads the resolved job reads the same"
    written: dict[str, Any] = manifest.dump(job)["spec"]["evaluation"]["prompts"]
    return written


def effective(prompts: dict[str, Any], evaluated: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with which the coordinator reads the evaluation's prompts, of the job and of the
    resolved job."""
    job = job_with(prompts, evaluated)
    read, again = (held_out(document) for document in (job, manifest.resolve(job, Path("/"))))
    assert read == again
    return read.model_dump(by_alias=True, exclude_none=True)


def held_out(job: RLHFJob) -> HeldOutPrompts:
    assert job.spec.evaluation is not None
    prompts = job.spec.evaluation.held_out(job.spec.prompts)
    assert prompts is not None
    return prompts


ORDER = {"shuffle": True, "lengthWindow": 0}
"""Fields of the order, which evaluations ignore."""


def test_prompts_of_an_evaluation_are_read_as_those_of_the_job() -> None:
    assert resolved(JOB, HELD_OUT) == JOB | HELD_OUT | {"shuffle": True}
    assert effective(JOB, HELD_OUT) == JOB | HELD_OUT | ORDER


@pytest.mark.parametrize(
    "own",
    [
        {"promptKey": "prompt"},
        {"columns": []},
        {"overlong": "Fail"},
        {"chatTemplateFile": "/data/other.jinja"},
        {"chatTemplateArguments": {}},
        {"systemMessage": "Think."},
    ],
    ids=lambda own: next(iter(own)),
)
def test_a_field_that_is_set_wins_though_it_has_the_default_of_the_job(own: dict[str, Any]) -> None:
    assert effective(JOB, HELD_OUT | own) == JOB | HELD_OUT | own | ORDER


def test_bare_text_among_chats_inherits_nothing_of_the_template() -> None:
    inherited = {"promptKey": "question", "columns": ["words"], "overlong": "Filter"}
    own = HELD_OUT | {"chatTemplate": False}
    assert effective(JOB, own) == inherited | own | ORDER
    assert resolved(JOB, own) == inherited | own | {"shuffle": True}


def test_an_empty_system_message_is_none() -> None:
    own = HELD_OUT | {"systemMessage": ""}
    assert "systemMessage" not in effective(JOB, own)
    assert resolved(JOB, own)["systemMessage"] == ""


def test_a_job_of_bare_text_may_be_evaluated_on_chats() -> None:
    own = HELD_OUT | {"chatTemplate": True, "systemMessage": "Be brief."}
    assert effective({"path": "/data/train.jsonl"}, own) == own | ORDER | {
        "promptKey": "prompt",
        "columns": [],
        "overlong": "Fail",
    }


def test_every_field_is_inherited_but_the_files_and_the_order() -> None:
    assert set(Prompts.model_fields) - set(INHERITED) == {"path", "sources", "shuffle", "length_window"}
    assert set(EvaluationPrompts.model_fields) == set(Prompts.model_fields) - {"length_window"}
    assert all(EvaluationPrompts.model_fields[name].default is None for name in INHERITED), (
        "the API server writes defaults into the object, and they would look as if the user had set them"
    )
