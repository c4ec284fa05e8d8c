"""Renders chat messages of an environment with the policy's chat template, after a turn that the policy ended.

Rule: the result does not depend on the turn's text, apart from the token that ended it. Must never guess: a template
that does not show a turn unchanged is refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_common.model_files.text_tokens import TURN


class ChatTemplateError(ValueError):
    """The template cannot write these messages; the text says why."""


def answer_of(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], ended_by: str, arguments: Mapping[str, Any] | None
) -> str:
    """Return the text between a turn that ended with the token `ended_by` and the next turn.

    `arguments` are the template's; None if it is not read here. Raises ChatTemplateError.
    """
    if arguments is None:
        raise ChatTemplateError("spec.prompts.chatTemplateFile is read by the coordinator alone: answer by message")
    if not tokenizer.chat_template:
        raise ChatTemplateError("the tokenizer has no chat template: answer by message")
    conversation = [{"role": "user", "content": ""}, {"role": "assistant", "content": TURN}, *map(dict, messages)]
    try:
        text = str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True, **arguments))
    except Exception as error:  # templates come with models and may raise anything
        raise ChatTemplateError(f"the chat template refuses these messages: {error}") from error
    _, found, answer = text.partition(TURN)
    if not found or TURN in answer:
        raise ChatTemplateError("the chat template does not show what the assistant wrote: answer by message")
    if not ended_by or not answer.startswith(ended_by):
        shown = answer[:40]
        raise ChatTemplateError(
            f"the policy ended its turn by {ended_by!r}, where the chat template writes {shown!r}: name the template's "
            "mark in spec.rollout.stopTokenIds, or answer by message"
        )
    return answer.removeprefix(ended_by)
