"""Chat templates: rendering with a file, arguments and a system message, and rejections by field."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.model_folders.models import build_tokenizer

from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.rollout import Prompts
from rlhf_common.names import ExitCode
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.storage import chat_template
from rlhf_coordinator.storage.prompts import prompts_digest
from rlhf_coordinator.storage.tokenized_prompts import read_prompts

OWN = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'think ' if enable_thinking else '' }}assistant: {% endif %}"
)
CHAT = [{"role": "user", "content": "Name a planet."}]
ANSWERED = [{"role": "system", "content": "Be loud."}, *CHAT]


def prompts_of(folder: Path, prompt: Any = CHAT, template: str | None = None, **fields: Any) -> Prompts:
    path = folder / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": prompt}) + "\n")
    if template is not None:
        file = folder / "chat.jinja"
        file.write_text(template)
        fields["chat_template_file"] = str(file)
    return Prompts(path=str(path), chat_template=True, **fields)


def rendered(prompts: Prompts, own: str | None = OWN) -> str:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = own
    (prompt,) = read_prompts(prompts, tokenizer, 256)
    assert tokenizer.chat_template == own
    return prompt.text


def test_arguments_reach_the_template(tmp_path: Path) -> None:
    assert rendered(prompts_of(tmp_path)) == "user: Name a planet.\nassistant: "
    thinking = prompts_of(tmp_path, chat_template_arguments={"enable_thinking": True})
    assert rendered(thinking) == "user: Name a planet.\nthink assistant: "


def test_a_file_takes_the_place_of_the_tokenizers_own(tmp_path: Path) -> None:
    prompts = prompts_of(
        tmp_path, template="<{{ messages[0].content }}>{{ date }}", chat_template_arguments={"date": "1"}
    )
    assert rendered(prompts) == rendered(prompts, own=None) == "<Name a planet.>1"


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (CHAT, "system: Be brief.\nuser: Name a planet.\nassistant: "),
        ("Name a planet.", "system: Be brief.\nuser: Name a planet.\nassistant: "),
        (ANSWERED, "system: Be loud.\nuser: Name a planet.\nassistant: "),
    ],
)
def test_a_chat_without_a_system_message_begins_with_that_of_the_job(tmp_path: Path, prompt: Any, text: str) -> None:
    assert rendered(prompts_of(tmp_path, prompt, system_message="Be brief.")) == text


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"chat_template_arguments": {"enable_think": 1}}, "chatTemplateArguments.enable_think", "is not read by the"),
        ({"chat_template_arguments": {"tokenize": True}}, "chatTemplateArguments.tokenize", "is no argument of templ"),
        ({"template": " \n"}, "chatTemplateFile", "has nothing in it; it must be a Jinja template"),
        ({"template": "a" * 65}, "chatTemplateFile", "has more than 64 bytes; it must be a Jinja template"),
        ({"chat_template_file": "/none/chat.jinja"}, "chatTemplateFile", "/none/chat.jinja cannot be read: No such"),
    ],
)
def test_what_does_nothing_or_is_no_template_is_refused_by_its_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], field: str, message: str
) -> None:
    monkeypatch.setattr(chat_template, "LARGEST", 64)
    with pytest.raises(JobError) as error:
        rendered(prompts_of(tmp_path, **fields))
    failure = error.value.failure
    assert (failure.exit_code, failure.field) == (ExitCode.BAD_DATA, f"spec.prompts.{field}")
    assert message in failure.message


def test_a_broken_template_is_refused_with_the_place_of_the_prompt(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"prompts.jsonl line 1 is refused by the chat template: .*endfor"):
        rendered(prompts_of(tmp_path, template="{% for message in messages %}"))


def test_a_journal_is_of_one_way_to_render(tmp_path: Path) -> None:
    """The digest includes everything that a tokenized prompt depends on, except fields that a job does not set."""
    job = {
        "algorithm": {"ppo": {}},
        "models": {"actor": {"path": "/m"}, "reward": {"function": {"file": "r.py"}}},
        "prompts": {"path": "p"},
    }
    spec = RLHFJobSpec.model_validate(job)

    def digest(**fields: Any) -> str:
        return prompts_digest(spec, prompts_of(tmp_path, **fields))

    plain = digest()
    others = [
        digest(system_message="Be brief."),
        digest(chat_template_arguments={"a": 1}),
        digest(chat_template_arguments={"a": 2}),
        digest(template="x"),
        digest(template="y"),
    ]
    assert len({plain, *others}) == 6
    written = json.dumps(["prompt", True, "/m", 256]) + json.dumps({"prompt": CHAT}) + "\n"
    assert plain == hashlib.sha256(written.encode()).hexdigest(), "journals go on"
    assert digest(chat_template_arguments={}) == plain
