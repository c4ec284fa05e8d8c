"""The prompts of a job, read with its policy's tokenizer and checked against its policy's limits.

Rule: it needs no weights.
"""

import json
from dataclasses import replace

from rlhf_api.job import RLHFJobSpec
from rlhf_common.chats import TOOLS, tools_of
from rlhf_coordinator.storage.policy_limits import read_policy_limits
from rlhf_coordinator.storage.prompts import Prompt, load_tokenizer
from rlhf_coordinator.storage.tokenized_prompts import read_prompts
from rlhf_coordinator.tokenizer_problems import tools_warnings


class PromptReader:
    """Reads the prompts of a resolved job."""

    def __init__(self, spec: RLHFJobSpec) -> None:
        """Load the tokenizer and the configuration of the policy. Raises JobError."""
        self._spec = spec
        self._tokenizer = load_tokenizer(spec.models.actor.path, spec.rank_group)
        self._limits = read_policy_limits(spec, self._tokenizer)

    def training(self) -> list[Prompt]:
        """Return the training prompts. Raises JobError."""
        spec, rollout = self._spec, self._spec.rollout
        keys = spec.algorithm.fields.response_keys
        sizes = rollout.max_prompt_tokens, keys, rollout.max_response_tokens
        prompts = read_prompts(spec.prompts, self._tokenizer, *sizes, limits=self._limits)
        if spec.prompts.chat_template and any(map(_offers_tools, prompts)):
            prompts[0] = replace(prompts[0], warnings=(*prompts[0].warnings, *tools_warnings(spec)))
        return prompts

    def evaluation(self) -> list[Prompt]:
        """Return the prompts of an evaluation with its own files; empty otherwise. Raises JobError."""
        settings, rollout = self._spec.evaluation, self._spec.rollout
        if settings is None or (held_out := settings.held_out(self._spec.prompts)) is None:
            return []
        sizes = rollout.max_prompt_tokens, (), rollout.max_response_tokens
        return read_prompts(held_out, self._tokenizer, *sizes, limits=self._limits)


def _offers_tools(prompt: Prompt) -> bool:
    return f'"{TOOLS}"' in prompt.record and bool(tools_of(json.loads(prompt.record)))
