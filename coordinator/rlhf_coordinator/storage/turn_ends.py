"""Whether generation stops where a chat template ends a turn of the assistant.

Rule: only what the template shows is judged. A template that refuses the trial, or that ends a turn by plain text,
gives no warning.
"""

from typing import Any

from rlhf_api.job.rollout import Message, Prompts
from rlhf_api.text_tokens import turn_marks
from rlhf_coordinator.storage.chat_template import ChatTemplate
from rlhf_coordinator.storage.policy_limits import PolicyLimits
from rlhf_coordinator.storage.prompt_places import Place
from rlhf_coordinator.storage.prompt_warnings import PromptWarnings


def warn_of_turn_end(
    prompts: Prompts, whole: Place, tokenizer: Any, limits: PolicyLimits, warnings: PromptWarnings
) -> None:
    """Warn where the chat template ends a turn with a token at which generation does not stop."""
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
    what = f"is rendered by a chat template that ends a turn with {texts[0]!r}, and generation stops only at {stops}"
    warnings.add(whole, what, f"name {marks[0]} in spec.rollout.stopTokenIds, or make it the tokenizer's eos_token")
