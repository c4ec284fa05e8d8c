"""Responses and prompts with the chat templates of the most used families.

The decoded training text is that of the line and the end of its turn, without a tag that the prompt opened; or the
line is rejected with its position and the remedy.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.model_folders.chat_families_reader import FAMILIES
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_api.job.rollout import Prompts
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.storage.prompts import Prompt
from rlhf_coordinator.storage.tokenized_prompts import read_prompts

ENDS = {
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
    "gemma": "<end_of_turn>",
    "phi": "<|end|>",
    "deepseek-r1": "<｜end▁of▁sentence｜>",
    "glm": "<|user|>",
    "granite": "<|end_of_text|>",
    "zephyr": "</s>",
}
"""End-of-sequence tokens; other families have <|im_end|>."""
ASKED = [{"role": "user", "content": "What is 2+2?"}]


@cache
def tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Return a byte tokenizer with the family's template and end-of-sequence token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    whole = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    whole.decoder = decoders.ByteLevel()
    end = AddedToken(ENDS.get(family, "<|im_end|>"), special=True, normalized=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=whole, bos_token="<s>", eos_token=end)
    tokenizer.chat_template = FAMILIES[family]
    return tokenizer


def read(folder: Path, family: str, prompt: Any, response: Any = None, **fields: Any) -> Prompt:
    path = folder / "data.jsonl"
    record = {"prompt": prompt, **({} if response is None else {"response": response}), **fields.pop("record", {})}
    path.write_text(json.dumps(record) + "\n")
    keys = () if response is None else ("response",)
    (read,) = read_prompts(
        Prompts(path=str(path), chat_template=True, **fields), tokenizer(family), 1 << 20, keys, 1 << 20
    )
    return read


def decoded(family: str, tokens: bytes) -> str:
    return str(tokenizer(family).decode(np.frombuffer(tokens, "<i4").tolist(), skip_special_tokens=False))


def trained(folder: Path, family: str, prompt: Any, response: Any, **fields: Any) -> str:
    """Return the decoded training tokens of a line's response, including the end of its turn."""
    (answer,) = read(folder, family, prompt, response, **fields).responses
    return decoded(family, answer.tokens)


def end_of_turn(folder: Path, family: str, **fields: Any) -> str:
    return trained(folder, family, ASKED, "x", **fields).strip().removeprefix("x")


WORDS = st.text(st.sampled_from("ab 2\n\"'\\{}é<中|"), min_size=1, max_size=12).filter(str.strip)
ANSWERS = st.one_of(
    WORDS,
    st.builds("<think>\n{}\n</think>\n\n{}".format, WORDS, WORDS),
    st.builds("<think>{}</think>{}".format, WORDS, WORDS),
    st.builds("{}\n</think>\n\n{}".format, WORDS, WORDS),
    st.builds("<think>{}".format, WORDS),
    st.builds("<think>\n\n</think>\n\n{}".format, WORDS),
    st.builds("{}<think>{}</think>".format, WORDS, WORDS),
)
TURNS = st.tuples(WORDS, ANSWERS).map(
    lambda turn: [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
)
CHATS = st.builds(
    lambda system, turns, asked: [
        *([{"role": "system", "content": system}] if system else []),
        *(message for turn in turns for message in turn),
        {"role": "user", "content": asked},
    ],
    st.none() | WORDS,
    st.lists(TURNS, max_size=2),
    WORDS,
)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"left": 2, "text": 'a "b"'}}}
SAID = st.one_of(
    st.builds(lambda text: [{"role": "assistant", "content": text}], ANSWERS),
    st.builds(
        lambda reasoning, text: [{"role": "assistant", "content": text, "reasoning_content": reasoning}], WORDS, WORDS
    ),
    st.builds(
        lambda first, asked, last: [
            {"role": "assistant", "content": first},
            {"role": "user", "content": asked},
            {"role": "assistant", "content": last},
        ],
        ANSWERS,
        WORDS,
        ANSWERS,
    ),
    st.builds(
        lambda first, result, last: [
            {"role": "assistant", "content": first, "tool_calls": [CALL]},
            {"role": "tool", "content": result},
            {"role": "assistant", "content": last},
        ],
        st.just("") | WORDS,
        WORDS,
        ANSWERS,
    ),
)
MANY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def refused_rightly(error: JobError) -> None:
    """Check that a rejection names the line and a remedy."""
    message = error.failure.message
    assert "data.jsonl line 1 " in message
    assert error.failure.field.startswith("spec.prompts.")
    remedies = ("chatTemplateFile", "is refused by the chat template: ", "remove it", "prompts.columns")
    assert any(remedy in message for remedy in remedies), message


@pytest.mark.parametrize("family", FAMILIES)
@MANY
@given(prompt=CHATS, answer=ANSWERS, thinking=st.booleans())
def test_a_response_is_trained_as_the_line_has_it(
    tmp_path: Path, family: str, prompt: Any, answer: str, thinking: bool
) -> None:
    fields: dict[str, Any] = {}
    if not thinking and "enable_thinking" in FAMILIES[family]:
        fields["chat_template_arguments"] = {"enable_thinking": False}
    try:
        learned = trained(tmp_path, family, prompt, answer, **fields)
        asked = read(tmp_path, family, prompt, **fields).text
    except JobError as error:
        return refused_rightly(error)
    end = end_of_turn(tmp_path, family, **fields)
    assert learned.endswith(end)
    body = learned.removesuffix(end)
    whole = body if body.strip() == answer.strip() else f"<think>{body}"
    if whole is body:
        assert body.endswith(answer), "space at the ends stays"
    else:  # the prompt has the tag already, and it is there once
        assert asked.rstrip().endswith("<think>")
        assert "".join(whole.split()) == "".join(answer.split())
    return None


@pytest.mark.parametrize("family", FAMILIES)
@MANY
@given(prompt=CHATS, said=SAID)
def test_answers_of_several_messages_are_trained_with_every_text_once_and_in_order(
    tmp_path: Path, family: str, prompt: Any, said: list[dict[str, Any]]
) -> None:
    try:
        learned = read(tmp_path, family, prompt, said)
    except JobError as error:
        return refused_rightly(error)
    (response,) = learned.responses
    text, at = decoded(family, response.tokens), 0
    begun = learned.text.rstrip().endswith("<think>")
    for message in said:
        for part in (message.get("reasoning_content", ""), message["content"]):
            shown = part.lstrip().removeprefix("<think>").lstrip() if begun and not at else part
            forms = [shown, json.dumps(shown, ensure_ascii=False)[1:-1]]
            places = [place for place in (text.find(form, at) for form in forms) if place >= 0]
            assert places, (part, text)
            at = min(places) + len(shown)
        assert all(call["function"]["name"] in text for call in message.get("tool_calls", ()))
    assert not any(text.count(f"{tag}{tag}") for tag in ("<think>", "<think>\n"))
    return None


@pytest.mark.parametrize("family", FAMILIES)
@MANY
@given(prompt=CHATS)
def test_a_prompt_holds_what_its_messages_say(tmp_path: Path, family: str, prompt: list[dict[str, str]]) -> None:
    try:
        text = read(tmp_path, family, prompt).text
    except JobError as error:
        return refused_rightly(error)
    for message in prompt:
        if message["role"] != "assistant":
            assert message["content"].strip() in text
    return None


PLAIN = ("4", "It is 4.\nQuite so.", "a <b> c", "né 中")
REASONED = "<think>\nTwo and two.\n</think>\n\n4"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("answer", PLAIN)
def test_every_family_takes_a_plain_answer(tmp_path: Path, family: str, answer: str) -> None:
    assert trained(tmp_path, family, ASKED, answer).strip() == answer + end_of_turn(tmp_path, family)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"deepseek-r1", "glm", "open-think"}))
def test_reasoning_in_the_answer_is_learned(tmp_path: Path, family: str) -> None:
    assert trained(tmp_path, family, ASKED, REASONED).strip() == REASONED + end_of_turn(tmp_path, family)


@pytest.mark.parametrize("family", ["deepseek-r1", "glm"])
@pytest.mark.parametrize("response", [REASONED, [{"role": "assistant", "content": REASONED}]])
def test_a_template_that_drops_or_changes_reasoning_is_refused(tmp_path: Path, family: str, response: Any) -> None:
    with pytest.raises(
        JobError, match=r"line 1 has a response under 'response' that the chat template does not"
    ) as error:
        trained(tmp_path, family, ASKED, response)
    assert "prompts.chatTemplateFile" in error.value.failure.message


def test_a_tag_that_the_prompt_opens_is_learned_once(tmp_path: Path) -> None:
    end = end_of_turn(tmp_path, "open-think")
    expected = "Two and two.\n</think>\n\n4" + end
    for answer in (REASONED, REASONED.replace("<think>\n", "<think>"), REASONED.removeprefix("<think>\n")):
        assert trained(tmp_path, "open-think", ASKED, answer) == expected


def test_a_tag_that_the_prompt_has_closed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="begins with <think>, which the chat template has written and closed before"):
        trained(tmp_path, "qwen3", ASKED, REASONED, chat_template_arguments={"enable_thinking": False})


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.content }}\n{% endfor %}", "doubles"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content | upper }}\n{% endfor %}", "changes"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content if m.role == 'user' }}\n{% endfor %}", "drops"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content | replace('four', '4') }}\n{% endfor %}", "replaces"),
    ],
    ids=["doubles", "changes", "drops", "replaces"],
)
def test_a_template_that_writes_something_else_is_refused(tmp_path: Path, template: str, problem: str) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(template + "{% if add_generation_prompt %}assistant: {% endif %}")
    asked = [{"role": "user", "content": "2+2"}]
    with pytest.raises(JobError, match="as it stands"):
        trained(tmp_path, "chatml", asked, "It is four.", chat_template_file=str(file))


def test_an_end_that_begins_the_next_answer_unasked_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ")
    assert trained(tmp_path, "chatml", ASKED, "4", chat_template_file=str(file)) == "4<|im_end|>"


def test_an_empty_thought_that_the_template_would_add_is_not_learned_but_warned_of(tmp_path: Path) -> None:
    prompt = read(tmp_path, "qwen3", ASKED, "4")
    assert decoded("qwen3", prompt.responses[0].tokens).strip() == "4<|im_end|>"
    assert any("would write '<think>\\n\\n</think>\\n\\n' before it" in text for text in prompt.warnings)


def test_an_answer_inside_an_open_thought_is_warned_of(tmp_path: Path) -> None:
    prompt = read(tmp_path, "open-think", ASKED, "4")
    assert any("without </think>, while the prompt ends in <think>" in text for text in prompt.warnings)


def test_a_tag_that_marks_the_turn_is_no_open_thought(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    assert read(tmp_path, "chatml", ASKED, "4", chat_template_file=str(file)).warnings == ()


def test_space_that_the_template_would_trim_stays_and_is_warned_of(tmp_path: Path) -> None:
    prompt = read(tmp_path, "llama3", ASKED, "4\n")
    assert decoded("llama3", prompt.responses[0].tokens) == "4\n<|eot_id|>"
    assert any("has space at the ends of a text under 'response'" in text for text in prompt.warnings)


def test_a_response_that_only_calls_a_tool_is_trained_as_the_template_writes_it(tmp_path: Path) -> None:
    said = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
    learned = trained(tmp_path, "qwen3", ASKED, said)
    assert learned.count("add") == 1
    assert learned.strip().endswith("</tool_call><|im_end|>")
    with pytest.raises(JobError, match="has tool_calls in a message, which the chat template does not read"):
        trained(tmp_path, "zephyr", ASKED, said)


def test_a_response_of_others_is_refused(tmp_path: Path) -> None:
    other = [{"role": "user", "content": "4"}]
    own = {"role": "assistant", "content": "4"}
    with pytest.raises(JobError, match="does not begin with a message of the assistant"):
        trained(tmp_path, "chatml", ASKED, [*other, own])
    with pytest.raises(JobError, match="does not end with a message of the assistant"):
        trained(tmp_path, "chatml", ASKED, [own, *other])
