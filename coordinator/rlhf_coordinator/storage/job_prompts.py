"""The prompts of a job, read by its policy's tokenizer and judged by its policy's limits.

Rule: needs no weights, so that `rlhf validate --for local` reads prompts as the start of a job does.
"""

from rlhf_api.job import RLHFJobSpec
from rlhf_coordinator.storage.policy_limits import read_policy_limits
from rlhf_coordinator.storage.prompts import Prompt, load_tokenizer
from rlhf_coordinator.storage.tokenized_prompts import read_prompts


class PromptReader:
    """Reads the prompts of a resolved job."""

    def __init__(self, spec: RLHFJobSpec) -> None:
        """Load the tokenizer and the configuration of the policy. Raises JobError."""
        self._spec = spec
        self._tokenizer = load_tokenizer(spec.models.actor.path, spec.rank_group)
        self._limits = read_policy_limits(spec, self._tokenizer)

    def training(self) -> list[Prompt]:
        """Return the prompts that are trained on. Raises JobError."""
        spec, rollout = self._spec, self._spec.rollout
        keys = spec.algorithm.fields.response_keys
        sizes = rollout.max_prompt_tokens, keys, rollout.max_response_tokens
        return read_prompts(spec.prompts, self._tokenizer, *sizes, limits=self._limits)

    def evaluation(self) -> list[Prompt]:
        """Return the prompts of an evaluation that has files of its own, else none. Raises JobError."""
        spec, rollout = self._spec, self._spec.rollout
        held_out = None if spec.evaluation is None else spec.evaluation.held_out(spec.prompts)
        if held_out is None:
            return []
        sizes = rollout.max_prompt_tokens, (), rollout.max_response_tokens
        return read_prompts(held_out, self._tokenizer, *sizes, limits=self._limits)
