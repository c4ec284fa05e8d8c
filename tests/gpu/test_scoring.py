"""Scoring: log-probabilities against one transformers forward pass per sample, and the rate, also as samples grow."""

from functools import partial
from typing import Any, Final

import numpy as np
import pytest
import torch
from tests.gpu.decoding import load, to_score
from tests.gpu.models import ONE_BILLION, TINY
from tests.gpu.timing import best_seconds, free_cache, name_of, peak_bytes

from gpu_check.plugin import CheckedMachine, Figure, Figures
from rlhf_common.samples import ScoringSample
from rlhf_workers.inference.model_scorer import LogProbabilityScorer, TokenScorer, ValueScorer
from rlhf_workers.inference.partial_scores import PartialScore
from rlhf_workers.models.loading import ValueModel

TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest difference of a log-probability. docs/determinism.md gives 1e-4 for chunks in float32; bfloat16 rounds logits
around ten to a thirty-second.
"""
PROMPT: Final = 16


@pytest.mark.gpu(seconds=75, gigabytes=24)
def test_scoring(machine: CheckedMachine, figures: Figures) -> None:
    """Log-probabilities and values are right, at once and as samples grow; how many tokens per second."""
    config = machine.sized(TINY, ONE_BILLION)
    made_up = partial(samples_of, machine.sized(96, 1024), config.vocab_size)
    for dtype in machine.dtypes:
        name, model = name_of(dtype), load(machine, config, dtype)
        scorer = LogProbabilityScorer(model, 1.0, model.device)
        off = largest_difference(model, scorer, made_up(4))
        figures.add(f"{name}_largest_difference", off, "of a log-probability")
        right = off <= TOLERANCE[dtype]
        figures.check(f"{name}: log-probabilities are those of transformers", right, f"off by {off:.3g} at most")
        peak = machine.measured("machine", f"{name}_tflops")
        parameters = sum(parameter.numel() for parameter in model.parameters())
        for rows in machine.sized((1, 4), (1, 4, 16, 32)):
            samples = made_up(rows)
            rate = sum(sample.length for sample in samples) / best_seconds(
                partial(scorer.score, samples), machine.sized(1, 2), model.device
            )
            share = 2 * parameters * rate / (peak * 1e12) if peak else "unknown"
            cells: dict[str, Figure] = {"batch": rows, "tokens_per_second": rate, "share_of_arithmetic": share}
            figures.row("tokens_per_second", dtype=name, **cells)
        if machine.cuda:
            figures.add(f"{name}_peak_memory_gb", peak_bytes(model.device) / 1e9, "GB, model and activations")
        grown(scorer, made_up(4), figures, f"{name} log-probabilities", TOLERANCE[dtype])
        critic = ValueModel(model.model, "model")
        torch.nn.init.normal_(critic.value_head.weight, std=0.02)
        critic.requires_grad_(False)
        grown(ValueScorer(critic, model.device), made_up(4), figures, f"{name} values", TOLERANCE[dtype])
        del model, scorer, critic
        free_cache()


def samples_of(tokens: int, vocabulary: int, count: int) -> list[ScoringSample]:
    """Return samples of at most `tokens` tokens, some a few shorter, so that batches are padded."""
    return to_score(PROMPT, (tokens - PROMPT - index % 7 for index in range(count)), vocabulary)


def largest_difference(model: Any, scorer: TokenScorer, samples: list[ScoringSample]) -> float:
    """Return the largest difference from log-softmax of the logits of one pass per sample."""
    off = 0.0
    for sample, scores in zip(samples, scorer.score(samples), strict=True):
        tokens = torch.from_numpy(sample.tokens.astype(np.int64)).to(model.device)
        with torch.inference_mode():
            logits = model(tokens[None], use_cache=False).logits[0, PROMPT - 1 : -1].float()
        wanted = logits.log_softmax(-1).gather(1, tokens[PROMPT:, None])[:, 0].cpu().numpy()
        off = max(off, float(np.abs(scores - wanted).max()))
    return off


def grown(scorer: TokenScorer, samples: list[ScoringSample], figures: Figures, name: str, allowed: float) -> None:
    """Compare scores as samples grow by a quarter at a time with those of whole passes."""
    chunks = scorer.chunks
    figures.check(f"{name}: the model can be scored as samples grow", chunks is not None, str(chunks is not None))
    if chunks is None:
        return
    whole, prefixes = scorer.score(samples), [PartialScore(prompt=PROMPT) for _ in samples]
    for part in (0.25, 0.5, 0.75):
        begun = [sample.tokens[: int(part * samples[0].length)] for sample in samples]
        while any(chunks.next_chunk(prefix, tokens, False) for prefix, tokens in zip(prefixes, begun, strict=True)):
            chunks.advance(prefixes, begun, ended=False)
    scores = scorer.finish(samples, prefixes)
    off = max(float(np.abs(scored - other).max()) for scored, other in zip(scores, whole, strict=True))
    figures.check(
        f"{name}: as samples grow they are those of whole passes", off <= allowed, f"off by {off:.3g} at most"
    )
