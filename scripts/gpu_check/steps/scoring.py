"""Scoring: log-probabilities against one transformers forward pass a sample, their rate, and as samples grow."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from gpu_check.random_models import ONE_BILLION, TINY, LlamaShape
from gpu_check.step import CheckedMachine, CheckStep, Report
from gpu_check.steps import decode
from gpu_check.timing import best_seconds
from rlhf_api.samples import SampleKey, ScoringSample
from rlhf_workers.inference.model_scorer import LogProbabilityScorer, TokenScorer, ValueScorer
from rlhf_workers.inference.partial_scores import PartialScore
from rlhf_workers.models.loading import ValueModel

TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest difference of a log-probability: docs/determinism.md says 1e-4 of chunks in float32 on a CPU, tiny models;
bfloat16 rounds logits around ten to a thirty-second."""
PROMPT: Final = 16


@dataclass(frozen=True)
class ScoredSizes:
    """Of the model and what is scored."""

    shape: LlamaShape
    batches: tuple[int, ...]
    tokens: int
    repeats: int


def run(machine: CheckedMachine, sizes: ScoredSizes, report: Report) -> None:
    """Every type of numbers; log-probabilities and values."""
    model_sizes = decode.DecodedSizes(sizes.shape, (1,), 1, 1, 1, 1)
    for dtype in (torch.bfloat16, torch.float32) if machine.bfloat16 else (torch.float32,):
        name = str(dtype).removeprefix("torch.")
        model = decode.load(machine, model_sizes, dtype)
        scorer = LogProbabilityScorer(model, 1.0, model.device)
        right(model, scorer, sizes, report, name)
        rates(machine, model, scorer, sizes, report, name)
        grown(scorer, sizes, report, f"{name} log-probabilities", TOLERANCE[dtype])
        critic = ValueModel(model.model, "model")
        torch.nn.init.normal_(critic.value_head.weight, std=0.02)
        critic.requires_grad_(False)
        grown(ValueScorer(critic, model.device), sizes, report, f"{name} values", TOLERANCE[dtype])
        del model, scorer, critic
        if machine.cuda:
            torch.cuda.empty_cache()


def made_up(count: int, tokens: int, vocabulary: int) -> list[ScoringSample]:
    """Samples of `tokens` tokens and a few less, so that batches are padded."""
    random = np.random.default_rng(0)
    return [
        ScoringSample(
            key=SampleKey(0, index, 0),
            prompt=random.integers(1, vocabulary, PROMPT).astype(np.int32),
            response=random.integers(1, vocabulary, tokens - PROMPT - index % 7).astype(np.int32),
            prompt_text="",
            response_text="",
            record="{}",
        )
        for index in range(count)
    ]


def right(model: Any, scorer: TokenScorer, sizes: ScoredSizes, report: Report, name: str) -> None:
    """Against log-softmax of the logits of one pass a sample."""
    samples = made_up(4, sizes.tokens, sizes.shape.vocabulary)
    off = 0.0
    for sample, scores in zip(samples, scorer.score(samples), strict=True):
        tokens = torch.from_numpy(sample.tokens.astype(np.int64)).to(model.device)
        with torch.inference_mode():
            logits = model(tokens[None], use_cache=False).logits[0, PROMPT - 1 : -1].float()
        wanted = logits.log_softmax(-1).gather(1, tokens[PROMPT:, None])[:, 0].cpu().numpy()
        off = max(off, float(np.abs(scores - wanted).max()))
    report.figure(f"{name}_largest_difference", off, "of a log-probability")
    passed = off <= TOLERANCE[model.dtype]
    report.check(f"{name}: log-probabilities are those of transformers", passed, f"off by {off:.3g} at most")


def rates(
    machine: CheckedMachine, model: Any, scorer: TokenScorer, sizes: ScoredSizes, report: Report, name: str
) -> None:
    """Tokens a second, and the share of the arithmetic that the machine was seen to do."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    peak = machine.measured("machine", f"{name}_tflops")
    for rows in sizes.batches:
        samples = made_up(rows, sizes.tokens, sizes.shape.vocabulary)
        tokens = sum(sample.length for sample in samples)
        seconds = best_seconds(partial(scorer.score, samples), sizes.repeats, model.device)
        share = 2 * parameters * tokens / seconds / (peak * 1e12) if peak else "unknown"
        cells = {"dtype": name, "batch": rows, "tokens_per_second": tokens / seconds, "share_of_arithmetic": share}
        report.row("tokens_per_second", **cells)
    if machine.cuda:
        peak_bytes = torch.cuda.max_memory_allocated(model.device)
        report.figure(f"{name}_peak_memory_gb", peak_bytes / 1e9, "GB, model and activations")


def grown(scorer: TokenScorer, sizes: ScoredSizes, report: Report, name: str, allowed: float) -> None:
    """As samples grow by a quarter at a time, against whole passes."""
    chunks = scorer.chunks
    report.check(f"{name}: the model can be scored as samples grow", chunks is not None, str(chunks is not None))
    if chunks is None:
        return
    samples = made_up(4, sizes.tokens, sizes.shape.vocabulary)
    whole = scorer.score(samples)
    prefixes = [PartialScore(prompt=PROMPT) for _ in samples]
    for part in (0.25, 0.5, 0.75):
        known = [sample.tokens[: int(part * sizes.tokens)] for sample in samples]
        while any(chunks.next_chunk(prefix, tokens, False) for prefix, tokens in zip(prefixes, known, strict=True)):
            chunks.advance(prefixes, known, ended=False)
    scores = scorer.finish(samples, prefixes)
    off = max(float(np.abs(one - other).max()) for one, other in zip(scores, whole, strict=True))
    report.check(f"{name}: as samples grow they are those of whole passes", off <= allowed, f"off by {off:.3g} at most")


STEP = CheckStep(
    "scoring",
    "log-probabilities and values are right, at once and as samples grow; how many tokens a second",
    run,
    small=ScoredSizes(TINY, batches=(1, 4), tokens=96, repeats=1),
    gpu=ScoredSizes(ONE_BILLION, batches=(1, 4, 16, 32), tokens=1024, repeats=2),
    limit_seconds=75,
    small_limit_seconds=180,
    gpu_gigabytes=24,
)
