"""Scores in chunks: bitwise equal to unchunked scores with blocks, otherwise equal within rounding."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.model_folders.models import ARCHITECTURES, VOCABULARY, write_policy

from rlhf_api.score_blocks import BLOCK, whole_blocks
from rlhf_common.samples import SampleKey, ScoringSample
from rlhf_workers.inference.chunk_forward import ChunkForward
from rlhf_workers.inference.model_scorer import LogProbabilityScorer, TokenScorer, ValueScorer
from rlhf_workers.inference.partial_scores import PartialScore
from rlhf_workers.models import loading as models

CPU = torch.device("cpu")
TOLERANCE = 1e-4
"""Tolerance of chunks in float32 without a bitwise guarantee, as in docs/determinism.md."""


def sample(prompt: int, response: int, number: int = 0) -> ScoringSample:
    rng = np.random.default_rng([prompt, response, number])
    tokens = rng.integers(3, VOCABULARY, prompt + response, dtype=np.int32)
    return ScoringSample(SampleKey(2, number, 0), tokens[:prompt], tokens[prompt:], "", "", "{}")


SHAPES = ((1, 1), (5, 58), (5, 59), (5, 60), (64, 1), (70, 200), (BLOCK, BLOCK + 1), (130, 7), (3, 190))
"""Prompt and response lengths around the ends of blocks."""


def scorer(folder: Path, architecture: str, kind: str, *, blocks: bool) -> TokenScorer:
    attention: models.Attention = "eager" if blocks else "sdpa"
    arguments: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "attention": attention, "field": "spec.models"}
    path = str(write_policy(folder, architecture))
    if kind == "reference":
        return LogProbabilityScorer(models.load_causal_lm(path, **arguments), 0.7, CPU, blocks=blocks)
    model = models.load_backbone_with_value_head(path, **arguments)
    torch.nn.init.normal_(model.value_head.weight, generator=torch.Generator().manual_seed(1))
    return ValueScorer(model, CPU, blocks=blocks)


def early(scorer: TokenScorer, item: ScoringSample, token_counts: Iterator[int]) -> PartialScore:
    """Score a sample incrementally, for one number of known tokens after the other."""
    assert scorer.chunks is not None
    prefix = PartialScore(prompt=len(item.prompt))
    for count in token_counts:
        tokens = item.tokens[:count]
        while scorer.chunks.next_chunk(prefix, tokens, False):
            scorer.chunks.advance([prefix], [tokens], ended=False)
        if scorer.chunks.blocks:
            assert prefix.positions == whole_blocks(count) * BLOCK
    return prefix


@pytest.mark.full(quick=2)
@pytest.mark.parametrize("kind", ["reference", "values"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_blocks_scored_early_leave_the_same_bits(tmp_path: Path, architecture: str, kind: str) -> None:
    scores = scorer(tmp_path, architecture, kind, blocks=True)
    samples = [sample(*shape) for shape in SHAPES]
    at_once = [scores.score([item])[0] for item in samples]
    for step in (1, 37, BLOCK, 150):
        for item, wanted in reversed(list(zip(samples, at_once, strict=True))):
            prefix = early(scores, item, iter(range(1, item.length, step)))
            assert scores.finish([item], [prefix])[0].tobytes() == wanted.tobytes(), (item.length, step)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_blocks_give_the_scores_of_a_whole_pass(tmp_path: Path, architecture: str) -> None:
    in_blocks = scorer(tmp_path, architecture, "reference", blocks=True)
    at_once = scorer(tmp_path, architecture, "reference", blocks=False)
    for shape in SHAPES:
        item = sample(*shape)
        np.testing.assert_allclose(in_blocks.score([item])[0], at_once.score([item])[0], atol=TOLERANCE)


def test_a_model_that_caps_its_scores_gets_no_fused_attention(tmp_path: Path) -> None:
    path = str(write_policy(tmp_path, "gemma2"))
    model = models.load_causal_lm(path, dtype=torch.float32, device=CPU, attention="sdpa", field="spec.models")
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("kind", ["reference", "values"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2"])
def test_samples_that_share_passes_of_any_length_agree_within_rounding(
    tmp_path: Path, architecture: str, kind: str
) -> None:
    scores = scorer(tmp_path, architecture, kind, blocks=False)
    samples = [sample(*shape, number) for number, shape in enumerate(SHAPES) if sum(shape) > 2]
    prefixes = [PartialScore(prompt=len(item.prompt)) for item in samples]
    assert scores.chunks is not None
    for share in (0.3, 0.5, 0.9):
        tokens = [item.tokens[: max(2, int(share * item.length))] for item in samples]
        todo = [
            n for n, known_tokens in enumerate(tokens) if scores.chunks.next_chunk(prefixes[n], known_tokens, False)
        ]
        scores.chunks.advance([prefixes[n] for n in todo], [tokens[n] for n in todo], ended=False)
    for result, wanted in zip(scores.finish(samples, prefixes), scores.score(samples), strict=True):
        np.testing.assert_allclose(result, wanted, atol=TOLERANCE)


def test_a_prefix_of_other_tokens_is_found_out(tmp_path: Path) -> None:
    scores, item = scorer(tmp_path, "llama", "reference", blocks=True), sample(10, 190)
    prefix = early(scores, item, iter((150,)))
    assert prefix.positions == 2 * BLOCK
    assert prefix.bytes == 2 * 2 * 2 * 8 * prefix.positions * 4  # layers, keys and values, heads, size, float32
    other = item.tokens.copy()
    other[2 * BLOCK] += 1  # the token after the last block: its log-probability was computed
    assert prefix.agrees(10, item.tokens)
    assert not prefix.agrees(10, other)
    assert not prefix.agrees(9, item.tokens)
    assert not prefix.agrees(10, item.tokens[: 2 * BLOCK])


def test_a_model_that_follows_no_mask_is_scored_whole(tmp_path: Path) -> None:
    model = scorer(tmp_path, "llama", "reference", blocks=True).model

    class Blind:  # sees keys of its own choice
        def __call__(self, **arguments: object) -> object:
            return model.base_model(input_ids=arguments["input_ids"])

    config = model.config.get_text_config()
    assert ChunkForward(model.base_model, config, torch.float32, "last_hidden_state").agrees()
    assert not ChunkForward(Blind(), config, torch.float32, "last_hidden_state").agrees()
