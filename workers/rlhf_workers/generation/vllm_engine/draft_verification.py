"""Verifies drafts in vLLM's model runner: a drafted token is accepted if it equals the token drawn at its position.

Rule: a position of a draft is drawn by the sample's key, as without a draft. Tokens up to the first different one
count, and that one counts as drawn.
"""

from typing import Any, Final

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput

from rlhf_workers.generation.vllm_engine.keyed_sampler import KeyedSampler

NOTHING: Final = -1
"""vLLM's mark for no token in the result of a verification."""
NO_DRAFT: Final = -2
"""Filler of a draft; equals neither a drawn token nor NOTHING."""
VERIFIES: Final = object()
"""Replaces vLLM's speculation configuration while a pass with drafts is prepared."""


class KeyedVerifier:
    """Replaces the model runner's `rejection_sampler`."""

    def __init__(self, sampler: KeyedSampler) -> None:
        self._sampler = sampler

    def __call__(
        self, metadata: Any, draft_probabilities: object, logits: torch.Tensor, sampling_metadata: object
    ) -> Any:
        """Return tokens [requests, longest draft + 1], filled up with NOTHING, with their log-probabilities.

        `metadata` is vLLM's SpecDecodeMetadata; logits [drafted + requests, vocabulary] are those of the next position
        of each request and of its drafted ones, in order.
        """
        drafted = np.array(metadata.num_draft_tokens)
        tokens, figures = self._sampler.draw(logits, (drafted + 1).tolist())
        table = _as_table(tokens, drafted + 1, NOTHING)
        drafts = _as_table(metadata.draft_token_ids.to(torch.int64), drafted, NO_DRAFT)
        accepted = (table[:, : drafts.shape[1]] == drafts).cumprod(dim=1).sum(dim=1)
        beyond = torch.arange(table.shape[1], device=table.device) > accepted[:, None]
        verified = table.masked_fill(beyond, NOTHING).to(torch.int32)
        flat = verified.reshape(-1, 1)
        probabilities = _as_table(figures, drafted + 1, 0.0).reshape(-1, 1)
        return SamplerOutput(
            sampled_token_ids=verified,
            logprobs_tensors=LogprobsTensors(flat, probabilities, torch.zeros_like(flat[:, 0])),
        )


def verify_drafts(runner: Any, sampler: KeyedSampler) -> None:
    """Let passes of vLLM's model runner with drafts verify them; other passes stay unchanged, unless vLLM drafts by
    itself."""
    runner.rejection_sampler = KeyedVerifier(sampler)
    if runner.speculative_config is not None:
        return  # vLLM drafts by itself, and every pass verifies
    prepare_inputs = runner._prepare_inputs

    def prepared(scheduled: Any, counts: Any) -> Any:
        if not scheduled.scheduled_spec_decode_tokens:
            return prepare_inputs(scheduled, counts)
        runner.speculative_config = VERIFIES
        try:
            return prepare_inputs(scheduled, counts)
        finally:
            runner.speculative_config = None

    runner._prepare_inputs = prepared


def _as_table(values: torch.Tensor, counts: Any, empty: float) -> torch.Tensor:
    """Return [n, longest] of values [sum of counts], one row per count, padded with `empty`."""
    rows = np.repeat(np.arange(len(counts)), counts)
    columns = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    table = torch.full((len(counts), int(max(counts, default=0))), empty, dtype=values.dtype, device=values.device)
    index = torch.from_numpy(np.stack([rows, columns])).to(values.device)
    table[index[0], index[1]] = values
    return table
