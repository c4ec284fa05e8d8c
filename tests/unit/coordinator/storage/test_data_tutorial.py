"""The prompt files of docs/tutorials/your-data.md, read as a job reads them."""

import json
from pathlib import Path

import pytest
from tests.support.model_folders.models import build_tokenizer

from rlhf_api.job.rollout import Prompts
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.storage.tokenized_prompts import read_prompts

DATA = Path(__file__).parents[4] / "examples/your_data"
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant: "


def test_plain_prompts_are_read_with_their_records() -> None:
    prompts = Prompts(path=str(DATA / "prompts.jsonl"), prompt_key="question")
    read = read_prompts(prompts, build_tokenizer(), 64)
    assert [prompt.text for prompt in read][1:] == ["Name a planet.", "Say anything you like."]
    assert [json.loads(prompt.record).get("words") for prompt in read] == [["red", "blue"], ["mars"], None]


def test_chats_are_rendered_by_the_template_and_need_the_switch() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    chats = Prompts(path=str(DATA / "chats.jsonl"), prompt_key="messages", chat_template=True)
    read = read_prompts(chats, tokenizer, 128)
    assert read[0].text == "system: Answer briefly.\nuser: Name a planet.\nassistant: "
    with pytest.raises(JobError, match="line 1 has a list under 'messages'; it must be a string"):
        read_prompts(chats.model_copy(update={"chat_template": False}), tokenizer, 128)


def test_a_prompt_that_is_too_long_is_named_by_its_line() -> None:
    prompts = Prompts(path=str(DATA / "prompts.jsonl"), prompt_key="question")
    with pytest.raises(JobError, match=r"prompts.jsonl line 1 has 32 tokens, rollout.maxPromptTokens is 20"):
        read_prompts(prompts, build_tokenizer(), 20)
