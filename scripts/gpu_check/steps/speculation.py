"""The torch engine verifies drafts on this device: the tokens of single steps, and what passes over several positions
take.

Drafts are made up from what the same samples are known to have, with a stated share of right tokens, so no drafter is
measured here. Tokens are compared in float32; in bfloat16 a logit's rounding shows in another shape of a pass, so
figures tell how many agree.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpu_check.random_models import ONE_BILLION, TINY, LlamaShape
from gpu_check.step import CheckedMachine, CheckStep, Report
from gpu_check.steps import decode
from rlhf_api.samples import SampleKey, SampleRequest, TokenArray
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.engine import EngineLimits, SamplingParameters
from rlhf_workers.generation.speculation.drafter import DraftRequest
from rlhf_workers.generation.speculation.speculator import Verified
from rlhf_workers.generation.torch_engine.engine import TorchEngine


@dataclass(frozen=True)
class VerifiedSizes:
    """Of the model and what is decoded."""

    shape: LlamaShape
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    """Drafted tokens a sample."""
    prompt: int
    tokens: int
    right: float
    """Share of drafted tokens that are what the policy draws."""


class KnownDrafts:
    """Proposes what samples are known to have, each token made wrong by chance."""

    def __init__(self, answers: dict[int, list[int]], length: int, right: float, vocabulary: int) -> None:
        self.drafted = self.accepted = 0
        self._answers, self._length, self._right, self._vocabulary = answers, length, right, vocabulary
        self._random = np.random.default_rng(0)

    def begin(self, request: SampleRequest) -> None:
        """Answers are known before."""

    def extend(self, key: SampleKey, tokens: TokenArray) -> None:
        """See begin."""

    def end(self, key: SampleKey) -> None:
        """See begin."""

    def wants(self, rows: int, keys: int) -> bool:
        """Always."""
        return True

    def propose(self, requests: Sequence[DraftRequest], keys: int) -> list[TokenArray]:
        """As many tokens as were asked for when this was made."""
        drafts = []
        for request in requests:
            start = len(request.tokens) - request.prompt_length
            draft = np.array(self._answers[request.key.sample][start : start + self._length], np.int32)
            wrong = self._random.random(len(draft)) >= self._right
            draft[wrong] = (draft[wrong] + 1) % self._vocabulary
            drafts.append(draft)
        return drafts

    def verified(
        self, outcomes: Sequence[Verified], pass_rows: int, keys: int, draft_seconds: float, pass_seconds: float
    ) -> None:
        """Counts."""
        self.drafted += sum(outcome.drafted for outcome in outcomes)
        self.accepted += sum(outcome.accepted for outcome in outcomes)


def run(machine: CheckedMachine, sizes: VerifiedSizes, report: Report) -> None:
    """In float32 for what must be equal, in bfloat16 for what must be fast."""
    model_sizes = decode.DecodedSizes(sizes.shape, sizes.batches, sizes.prompt, sizes.tokens, 1, 1)
    for dtype in (torch.float32, torch.bfloat16) if machine.bfloat16 and machine.cuda else (torch.float32,):
        name = str(dtype).removeprefix("torch.")
        report.say(f"making a model in {name}")
        model = decode.load(machine, model_sizes, dtype)
        for way, arguments in decode.WAYS.items():
            for batch in sizes.batches:
                compare(model, sizes, batch, way, arguments, report, name)
        del model
        if machine.cuda:
            torch.cuda.empty_cache()


def compare(
    model: Any, sizes: VerifiedSizes, batch: int, way: str, arguments: dict[str, Any], report: Report, name: str
) -> None:
    """One batch without drafts, and with drafts of each length."""
    static: bool = arguments["static"]
    limits = EngineLimits(batch, sizes.prompt, sizes.tokens)
    try:
        engine = TorchEngine(
            model,
            decode.EndlessText(),
            SamplingParameters(),
            limits,
            deterministic=False,
            static_shapes=static,
            fused_kernels=arguments.get("kernels", "Disabled"),
        )
    except WorkError as error:
        report.check(f"{name}, {way}, batch {batch}: the engine starts", False, str(error))
        return
    samples = decode.requests(batch, sizes.prompt, sizes.tokens, sizes.shape.vocabulary)
    decode.decoded(engine, samples)  # warms up, and captures
    plain_seconds, wanted = timed(engine, samples)
    for length in sizes.lengths:
        drafts = KnownDrafts(wanted, length, sizes.right, sizes.shape.vocabulary)
        engine.draft_by(drafts)
        decode.decoded(engine, samples)
        seconds, found = timed(engine, samples)
        alike = sum(found[index] == wanted[index] for index in wanted)
        report.row(
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
            what = f"float32, {way}, batch {batch}, {length} drafted: same tokens"
            report.check(what, alike == batch and drafts.accepted > 0, f"{alike} of {batch} samples")


def timed(engine: TorchEngine, samples: list[SampleRequest]) -> tuple[float, dict[int, list[int]]]:
    """Seconds for whole samples, and their tokens."""
    started = time.perf_counter()
    tokens = decode.decoded(engine, samples)
    return time.perf_counter() - started, tokens


STEP = CheckStep(
    "speculation",
    "the torch engine verifies drafts: the tokens of single steps in float32, in plain, captured and fused passes",
    run,
    small=VerifiedSizes(TINY, batches=(2,), lengths=(3,), prompt=8, tokens=16, right=0.8),
    gpu=VerifiedSizes(ONE_BILLION, batches=(1, 4, 16, 64), lengths=(1, 2, 4, 8), prompt=64, tokens=128, right=0.7),
    limit_seconds=180,
    small_limit_seconds=180,
    gpu_gigabytes=20,
)
