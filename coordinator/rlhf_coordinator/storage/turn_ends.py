"""How a chat template ends a turn of the assistant, and whether generation stops there.

Rule: only what the template shows is judged. A template that refuses the trial, or that ends a turn by plain text,
gives no warning.
"""

from typing import Any, Final

from rlhf_api.job.rollout import Prompts
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.storage.chat_template import ChatTemplate
from rlhf_coordinator.storage.policy_limits import PolicyLimits
from rlhf_coordinator.storage.prompt_places import Place
from rlhf_coordinator.storage.prompt_warnings import PromptWarnings

PROBE: Final = "rlhf-turn-0f6b"
"""Stands for a turn; no template writes it of its own."""


def warn_of_turn_end(
    prompts: Prompts, whole: Place, tokenizer: Any, limits: PolicyLimits, warnings: PromptWarnings
) -> None:
    """Warn where the chat template ends a turn with a token at which generation does not stop."""
    if not (prompts.chat_template and limits.stops):
        return
    end = _turn_end(prompts, whole, tokenizer)
    [written] = tokenizer([end], add_special_tokens=False)["input_ids"]
    marks = [token for token in written if token in tokenizer.added_tokens_decoder]
    if not marks or limits.stops.intersection(marks) or any(stop in end for stop in limits.stop_strings):
        return
    mark, stops = (
        tokenizer.decode(marks[:1]),
        ", ".join(repr(tokenizer.decode([stop])) for stop in sorted(limits.stops)),
    )
    what = f"is rendered by a chat template that ends a turn with {mark!r}, and generation stops only at {stops}"
    warnings.add(whole, what, f"name {marks[0]} in spec.rollout.stopTokenIds, or make it the tokenizer's eos_token")


def _turn_end(prompts: Prompts, whole: Place, tokenizer: Any) -> str:
    """Return what the template writes after a response."""
    messages = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
    try:
        text = ChatTemplate(prompts, tokenizer).render(whole, messages, add_generation_prompt=False)
    except JobError:
        return ""
    return text.rpartition(PROBE)[2]
