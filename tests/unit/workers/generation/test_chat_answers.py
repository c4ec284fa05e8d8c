"""Answers that are chat messages: the input is the template's text of the whole conversation."""

from collections.abc import Mapping
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from rlhf_workers.generation.environment.chat_answers import ChatTemplateError, answer_of

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if quiet %}<think></think>{% endif %}{% endif %}"
)
INSTRUCT = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ message.content }}</s>"
    "{% elif message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% else %}{{ raise_exception('no role ' + message.role) }}{% endif %}{% endfor %}"
)
TOOL = [{"role": "tool", "content": "4"}]
USER = [{"role": "user", "content": "and 5?"}]


def tokenizer_of(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"x": 0}, unk_token="x")))
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "end", "messages", "arguments"),
    [
        (CHATML, "<|im_end|>", TOOL, {}),
        (CHATML, "<|im_end|>", [*TOOL, *USER], {"quiet": True}),
        (INSTRUCT, "</s>", USER, {}),
    ],
)
def test_prompt_turn_and_answer_are_the_whole_conversation(
    template: str, end: str, messages: list[dict[str, str]], arguments: Mapping[str, Any]
) -> None:
    tokenizer = tokenizer_of(template)

    def rendered(conversation: list[dict[str, str]]) -> str:
        text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True, **arguments)
        return str(text)

    asked = [{"role": "user", "content": "2+2?"}]
    whole = rendered([*asked, {"role": "assistant", "content": "let me see"}, *messages])
    answer = answer_of(tokenizer, messages, end, arguments)
    assert whole.endswith(f"let me see{end}{answer}")
    assert arguments or f"{rendered(asked)}let me see{end}{answer}" == whole


@pytest.mark.parametrize(
    ("template", "end", "messages", "arguments", "words"),
    [
        (None, "<|im_end|>", TOOL, {}, "the tokenizer has no chat template: answer by message"),
        (CHATML, "<|im_end|>", TOOL, None, "spec.prompts.chatTemplateFile is read by the coordinator alone"),
        (CHATML, "</s>", TOOL, {}, "ended its turn by '</s>', where the chat template writes '<|im_end|>"),
        (CHATML, "", TOOL, {}, "name the template's mark in spec.rollout.stopTokenIds"),
        (INSTRUCT, "</s>", TOOL, {}, "the chat template refuses these messages: no role tool"),
        ("{{ messages[-1].content }}", "</s>", TOOL, {}, "does not show what the assistant wrote"),
    ],
)
def test_what_cannot_be_written_is_named(
    template: str | None, end: str, messages: list[dict[str, str]], arguments: Mapping[str, Any] | None, words: str
) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        answer_of(tokenizer_of(template), messages, end, arguments)
    assert words in str(caught.value)
