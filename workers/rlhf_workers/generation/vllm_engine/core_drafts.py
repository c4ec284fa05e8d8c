"""Gives drafts to vLLM's scheduler for its next step.

Rule: a draft is valid for one step. `room` limits it.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from vllm.config import CUDAGraphMode

from rlhf_workers.generation.speculation.drafter import MAX_DRAFT
from rlhf_workers.generation.vllm_engine.core_caches import NEVER
from rlhf_workers.generation.vllm_engine.draft_budget import DecodingSample, draft_budget, padded_widths

ROLLED_BACK: Final = ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "MLAAttentionSpec")
"""Cache kinds that overwrite positions after a rejected token; a recurrent state cannot be rolled back."""


class CoreDrafts:
    """Drafts in a core's scheduler."""

    def __init__(self, core: Any) -> None:
        """`core` is vLLM's EngineCore."""
        self._scheduler = core.scheduler
        if core.vllm_config.speculative_config is None:  # vLLM counts drafts of its own drafters
            self._scheduler.make_spec_decoding_stats = lambda *arguments, **named: None
        self._config = core.vllm_config
        self._longest_sequence = int(core.vllm_config.model_config.max_model_len)
        self._groups = len(self._scheduler.kv_cache_config.kv_cache_groups)
        self._offered: list[Any] = []

    @property
    def refusal(self) -> str:
        """Return why drafts cannot be verified for this model; empty if they can."""
        groups = self._scheduler.kv_cache_config.kv_cache_groups
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups} - set(ROLLED_BACK))
        return f"its caches are {' and '.join(kinds)}, which cannot be rolled back past a wrong token" if kinds else ""

    @property
    def widths(self) -> npt.NDArray[np.int64]:
        """Return the padded rows of a pass over 0, 1, 2 ... rows, up to the widest pass."""
        scheduler, compilation = self._config.scheduler_config, self._config.compilation_config
        widest = min(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * (1 + MAX_DRAFT))
        captures = compilation.cudagraph_mode != CUDAGraphMode.NONE
        return padded_widths(widest, (compilation.cudagraph_capture_sizes or ()) if captures else ())

    def decoding(self) -> dict[str, int]:
        """Return request -> prompt and response tokens, for the requests that the next step decodes.

        Empty if the step may also admit or prefill samples.
        """
        scheduler = self._scheduler
        moving = [request for request in scheduler.running if request.next_decode_eligible_step != NEVER]
        places = scheduler.max_num_running_reqs - len(scheduler.running)
        if places > 0 and any(request.next_decode_eligible_step != NEVER for request in scheduler.waiting):
            return {}
        if any(request.num_tokens - request.num_computed_tokens != 1 for request in moving):
            return {}
        return {request.request_id: request.num_tokens for request in moving}

    def room(self, decoding: Mapping[str, int], longest: Mapping[str, int]) -> dict[str, int]:
        """Return the maximum drafted tokens of each request in `decoding`; `longest` limits them."""
        scheduler = self._scheduler
        samples = [
            DecodingSample(name, tokens, min(longest.get(name, 0), self._longest_sequence - tokens - 1))
            for name, tokens in decoding.items()
        ]
        free = int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks()) // self._groups
        step_tokens = int(scheduler.max_num_scheduled_tokens) - len(samples)
        return draft_budget(samples, step_tokens, free, int(scheduler.block_size))

    def offer(self, name: str, draft: list[int]) -> None:
        """Let the next step verify a draft for a request."""
        request = self._scheduler.requests[name]
        request.spec_token_ids = draft
        self._offered.append(request)

    def take_back(self) -> None:
        """Remove what is left of the offered drafts."""
        for request in self._offered:
            request.spec_token_ids = []
        self._offered.clear()
