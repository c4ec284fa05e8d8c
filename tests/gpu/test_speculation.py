"""The torch engine verifies drafts on this device: tokens equal to single steps, and the time of multi-position passes.

Drafts are derived from the known tokens of the samples with a given share of right tokens, so no drafter is measured
here. Tokens are compared in float32; in bfloat16 a logit's rounding depends on the shape of a pass, so the figures give
the share that agrees.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from benchmarks.known_responses import KnownResponses
from tests.gpu.decoding import WAYS, decoded, engine_of, load, requests
from tests.gpu.models import ONE_BILLION, TINY
from tests.gpu.timing import free_cache, name_of
from transformers import LlamaConfig

from gpu_check.plugin import CheckedMachine, Figures
from rlhf_common.samples import SampleRequest, TokenArray
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.speculation.drafter import DraftRequest
from rlhf_workers.generation.speculation.speculator import Verified
from rlhf_workers.generation.torch_engine.engine import TorchEngine


@dataclass(frozen=True)
class VerifiedSizes:
    """Sizes of the model and of the decoded samples."""

    config: LlamaConfig
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    """Drafted tokens per sample."""
    prompt: int
    tokens: int
    right: float
    """Share of drafted tokens that the policy would draw."""


SMALL = VerifiedSizes(TINY, batches=(2,), lengths=(3,), prompt=8, tokens=16, right=0.8)
LARGE = VerifiedSizes(ONE_BILLION, batches=(1, 4, 16, 64), lengths=(1, 2, 4, 8), prompt=64, tokens=128, right=0.7)


class KnownDrafts(KnownResponses):
    """A `Speculator` that proposes a given number of tokens of the known responses."""

    def __init__(self, answers: dict[int, list[int]], length: int, sizes: VerifiedSizes) -> None:
        super().__init__(sizes.right, answers, sizes.config.vocab_size)
        self.drafted = self.accepted = 0
        self._length = length

    def wants(self, rows: int, keys: int) -> bool:
        """Implements Speculator."""
        return True

    def propose(self, requests: Sequence[DraftRequest], keys: int) -> list[TokenArray]:
        """Implements Speculator."""
        return [draft.tokens[: self._length] for draft in self.draft(requests)]

    def verified(
        self, outcomes: Sequence[Verified], pass_rows: int, keys: int, draft_seconds: float, pass_seconds: float
    ) -> None:
        """Implements Speculator."""
        self.drafted += sum(outcome.drafted for outcome in outcomes)
        self.accepted += sum(outcome.accepted for outcome in outcomes)


@pytest.mark.gpu(seconds=180, gigabytes=20)
def test_speculation(machine: CheckedMachine, figures: Figures) -> None:
    """The torch engine verifies drafts: the tokens of single steps in float32, in plain, captured and fused passes."""
    sizes = machine.sized(SMALL, LARGE)
    for dtype in reversed(machine.dtypes):
        figures.say(f"making a model in {name_of(dtype)}")
        model = load(machine, sizes.config, dtype)
        for way in WAYS:
            for batch in sizes.batches:
                compare(model, sizes, batch, way, figures)
        del model
        free_cache()


def compare(model: Any, sizes: VerifiedSizes, batch: int, way: str, figures: Figures) -> None:
    """Decode one batch without drafts, and with drafts of each length."""
    name = name_of(model.dtype)
    try:
        engine = engine_of(model, batch, sizes.prompt, sizes.tokens, **WAYS[way])
    except WorkError as error:
        figures.check(f"{name}, {way}, batch {batch}: the engine starts", False, str(error))
        return
    samples = requests(batch, sizes.prompt, sizes.tokens, sizes.config.vocab_size)
    decoded(engine, samples)  # warms up, and captures
    plain_seconds, wanted = timed(engine, samples)
    for length in sizes.lengths:
        drafts = KnownDrafts(wanted, length, sizes)
        engine.draft_by(drafts)
        decoded(engine, samples)
        seconds, found = timed(engine, samples)
        alike = sum(found[index] == wanted[index] for index in wanted)
        figures.row(
            "verified",
            dtype=name,
            way=way,
            batch=batch,
            drafted_a_sample=length,
            accepted_share=drafts.accepted / max(1, drafts.drafted),
            times_as_fast=plain_seconds / seconds,
            same_samples=alike,
        )
        if name == "float32":
            drafted = f"float32, {way}, batch {batch}, {length} drafted: same tokens"
            figures.check(drafted, alike == batch and drafts.accepted > 0, f"{alike} of {batch} samples")


def timed(engine: TorchEngine, samples: list[SampleRequest]) -> tuple[float, dict[int, list[int]]]:
    """Return seconds for whole samples, and their tokens."""
    started = time.perf_counter()
    tokens = decoded(engine, samples)
    return time.perf_counter() - started, tokens
