"""Drafts change no distribution: a million draws from a small vocabulary, with accepted and rejected drafts.

The policy is a table of the next token by the last one. Drafts come from another distribution, so many are wrong. The
second test is a smaller one with a whole engine.
"""

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.support.workers.engine_driving import MakeEngine, finish, requests
from tests.support.workers.scripted_drafts import ScriptedSpeculator

from rlhf_common.samples import SampleKey, SampleRequest
from rlhf_workers.generation.engine import SamplingParameters
from rlhf_workers.generation.sampling import sample, uniforms
from rlhf_workers.generation.torch_engine.engine import TorchEngine
from rlhf_workers.generation.torch_engine.verification import cut_at_ends, verdict

WORDS, SAMPLES, POSITIONS = 5, 250_000, 4


def deviation(square: float, freedom: int) -> float:
    """Return how many standard deviations a chi-square statistic is from its mean.

    Source: Wilson and Hilferty: the cube root of a chi-square variable is nearly normal.
    """
    spread = 2 / (9 * freedom)
    return float(((square / freedom) ** (1 / 3) - (1 - spread)) / np.sqrt(spread))


@pytest.mark.full
def test_a_million_drafted_draws_have_the_policys_distribution() -> None:
    random = np.random.default_rng(0)
    table = torch.from_numpy(random.normal(0, 1, (WORDS, WORDS)).astype(np.float32))
    uniform = np.stack([uniforms(key, 0, POSITIONS) for key in range(SAMPLES)])
    tokens, length, accepted = np.zeros((SAMPLES, POSITIONS + 1), np.int64), np.zeros(SAMPLES, np.int64), 0
    while (left := np.flatnonzero(length < POSITIONS)).size:
        counts = np.minimum(random.integers(1, POSITIONS + 1, len(left)), POSITIONS - length[left])
        fed = random.integers(0, WORDS, (len(left), POSITIONS)).astype(np.int32)  # drafts, behind the sample's own
        fed[:, 0] = tokens[left, length[left]]
        at = np.minimum(length[left, None] + np.arange(POSITIONS), POSITIONS - 1)
        logits = table[torch.from_numpy(fed.astype(np.int64))].view(-1, WORDS)
        chances = torch.from_numpy(uniform[left[:, None], at].ravel())
        drawn = sample(logits, chances, SamplingParameters())[0].view(fed.shape).numpy()
        known_tokens = np.zeros(len(left), np.int64)
        judged = verdict(drawn, np.roll(fed, -1, axis=1), known_tokens, counts)
        cut, _ = cut_at_ends(judged, np.zeros(drawn.shape, bool), known_tokens)
        for ahead in range(POSITIONS):
            own = cut.positions > ahead
            tokens[left[own], length[left[own]] + ahead + 1] = drawn[own, ahead]
        length[left] += cut.positions
        accepted += int(cut.accepted.sum())
    assert 100_000 < accepted < 500_000, "drafts were right and wrong"
    found = np.bincount(np.ravel_multi_index(tuple(tokens[:, 1:].T), (WORDS,) * POSITIONS), minlength=WORDS**POSITIONS)
    probability = table.double().softmax(-1).numpy()
    wanted = probability[0]
    for _ in range(POSITIONS - 1):
        wanted = (wanted[..., None] * probability).reshape(*wanted.shape, WORDS)
    expected = wanted.ravel() * SAMPLES
    assert expected.min() > 1
    square = float(((found - expected) ** 2 / expected).sum())
    assert abs(deviation(square, WORDS**POSITIONS - 1)) < 5


def test_what_an_engine_draws_with_drafts_has_the_distribution_of_what_it_draws_without(
    make_engine: MakeEngine,
) -> None:
    """Three tokens after one prompt, from a vocabulary of three, with other random keys: chi-square of two samples.

    In bfloat16, where drafts may change a sample's own tokens; in float32 they must be equal.
    """
    samples, positions, words = 1536, 3, 3
    random = np.random.default_rng(0)
    prompt = requests(1, seed=7)[0].prompt
    keys = random.integers(2**62, size=2 * samples)

    def drawn(engine: TorchEngine, part: npt.NDArray[np.int64]) -> Counter[tuple[int, ...]]:
        asked = [SampleRequest(SampleKey(0, at, 0), prompt, int(key), positions) for at, key in enumerate(part)]
        return Counter(tuple(response.tokens.tolist()) for response in finish(engine, asked).values())

    ways: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "top_k": words,
        "slots": 256,
        "attention": "sdpa",
        "response_tokens": positions,
    }
    without = drawn(make_engine(**ways), keys[:samples])
    sayings = sorted(without)
    will_be = {at: sayings[index] for at, index in enumerate(random.integers(len(sayings), size=samples))}
    drafts = ScriptedSpeculator(random, longest=positions, right=1.0, answers=will_be)
    found = drawn(make_engine(**ways, speculator=drafts), keys[samples:])
    assert min(drafts.accepted, drafts.drafted - drafts.accepted) > samples // 4, "drafts were right and wrong"
    cells = [
        (found[response], without[response])
        for response in found.keys() | without.keys()
        if found[response] + without[response] >= 10
    ]
    square = sum((drafted - plain) ** 2 / (drafted + plain) for drafted, plain in cells)
    assert len(cells) > 10
    assert abs(deviation(square, len(cells) - 1)) < 5
