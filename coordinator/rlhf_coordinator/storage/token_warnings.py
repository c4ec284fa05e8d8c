"""Warnings about the tokens of prompts: their begin and end, missing characters, and the end of a turn.

Rule: these may be intended, so they are warnings.
"""

from collections.abc import Sequence
from typing import Any

from rlhf_api.job.rollout import Prompts
from rlhf_common.chats import Message
from rlhf_common.model_files.text_tokens import turn_marks
from rlhf_coordinator.storage.chat_template import ChatTemplate
from rlhf_coordinator.storage.policy_limits import PolicyLimits
from rlhf_coordinator.storage.prompt_places import Place
from rlhf_coordinator.storage.prompt_warnings import PromptWarnings


def warn_of_turn_end(
    prompts: Prompts, whole: Place, tokenizer: Any, limits: PolicyLimits, warnings: PromptWarnings
) -> None:
    """Warn if the chat template ends a turn with tokens, and generation stops at none of them."""
    if not (prompts.chat_template and limits.stops):
        return

    def render(messages: list[Message], **_: Any) -> str:
        return ChatTemplate(prompts, tokenizer).render(whole, messages, add_generation_prompt=False)

    marks = turn_marks(tokenizer, render)
    texts = [tokenizer.decode([mark]) for mark in marks]
    stopped = any(stop in text or text in stop for stop in limits.stop_strings for text in texts)
    if not marks or limits.stops.intersection(marks) or stopped:
        return
    stops = ", ".join(repr(tokenizer.decode([stop])) for stop in sorted(limits.stops))
    problem = f"is rendered by a chat template that ends a turn with {texts[0]!r}, and generation stops only at {stops}"
    warnings.add(whole, problem, f"name {marks[0]} in spec.rollout.stopTokenIds, or make it the tokenizer's eos_token")


def warn_of_prompt_ends(
    place: Place, ids: list[int], tokenizer: Any, limits: PolicyLimits, warnings: PromptWarnings
) -> None:
    """Warn about a prompt without the tokenizer's first tokens, or with a token at its end where generation stops."""
    start = list(limits.start)
    if ids[: len(start)] != start:
        first = tokenizer.decode(start)
        problem = f"is rendered without {first!r}, with which the tokenizer begins a text"
        warnings.add(place, problem, "write it in the chat template, such as {{ bos_token }}, if the model knows it")
    if ids[-1] in limits.stops and ids != start:
        problem = f"ends with {tokenizer.decode(ids[-1:])!r}, at which generation stops"
        warnings.add(place, problem, "remove it, or let the chat template begin the turn of the assistant")


def warn_of_unknown(
    place: Place,
    key: str,
    tokens: Sequence[int],
    record: str,
    tokenizer: Any,
    limits: PolicyLimits,
    warnings: PromptWarnings,
) -> None:
    """Warn about the token for unknown characters in tokens, unless the record itself contains its text."""
    if limits.unknown is None or limits.unknown not in tokens:
        return
    unknown = tokenizer.decode([limits.unknown])
    if unknown not in record:
        problem = f"has characters under {key!r} that the tokenizer does not know, so that the policy reads {unknown!r}"
        warnings.add(place, problem, "remove them, or add them to the tokenizer and the model")
