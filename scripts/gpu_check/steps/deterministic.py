"""Deterministic mode on this device, where nothing is promised: which of its promises of a CPU hold here.

A sample is decoded alone, in batches of several sizes and among other neighbours, resumed from its tokens, and scored
alone and beside others; what is compared are tokens, and log-probabilities to the last bit.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from gpu_check.random_models import HALF_BILLION, TINY, LlamaShape
from gpu_check.step import CheckedMachine, CheckStep, Report
from gpu_check.steps import decode
from rlhf_api.samples import ResponsePart, SampleKey, SampleRequest, ScoringSample
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.engine import EngineLimits, SamplingParameters
from rlhf_workers.generation.torch_engine.buckets import TILE_ROWS
from rlhf_workers.generation.torch_engine.engine import TorchEngine
from rlhf_workers.generation.torch_engine.tiles import Tiles
from rlhf_workers.inference.model_scorer import LogProbabilityScorer


@dataclass(frozen=True)
class RepeatedSizes:
    """Of the model and what is decoded."""

    shape: LlamaShape
    batches: tuple[int, ...]
    prompt: int
    tokens: int


def run(machine: CheckedMachine, sizes: RepeatedSizes, report: Report) -> None:
    """Decodes the same samples in every way."""
    model_sizes = decode.DecodedSizes(sizes.shape, sizes.batches, sizes.prompt, sizes.tokens, 1, 1)
    for dtype in (torch.float32, torch.bfloat16) if machine.bfloat16 else (torch.float32,):
        name = str(dtype).removeprefix("torch.")
        model = decode.load(machine, model_sizes, dtype)
        model.set_attn_implementation("eager")
        decoded(machine, model, sizes, report, name)
        scored(model, sizes, report, name)
        del model


def decoded(machine: CheckedMachine, model: Any, sizes: RepeatedSizes, report: Report, name: str) -> None:
    """Tokens and bits by batch size; the check is of tokens, in float32: elsewhere figures tell."""
    samples = varied(max(sizes.batches), sizes)
    try:
        alone = answers(engine_of(model, TILE_ROWS, sizes), samples[:TILE_ROWS])
    except WorkError as error:
        refused = not machine.cuda and name != "float32"
        what = "refuses deterministic mode on a CPU" if refused else "starts in deterministic mode"
        report.check(f"{name}: the engine {what}", refused or machine.cuda, str(error))
        return
    tiles = engine_of(model, TILE_ROWS, sizes)._tiles
    assert tiles is not None
    widths_that_hold(tiles, sizes, report, name)
    ways = {f"batch {rows}": (rows, samples[:rows]) for rows in sizes.batches}
    ways["other neighbours"] = (TILE_ROWS, samples[: TILE_ROWS // 2] + samples[-TILE_ROWS // 2 :])
    ways["the other way round"] = (TILE_ROWS, samples[:TILE_ROWS][::-1])
    for way, (rows, chosen) in ways.items():
        compare(report, name, way, alone, answers(engine_of(model, rows, sizes), chosen))
    compare(report, name, "resumed", alone, resumed(model, samples[:TILE_ROWS], sizes))


def widths_that_hold(tiles: Tiles, sizes: RepeatedSizes, report: Report, name: str) -> None:
    """Which wider passes gave the bits of a tile here."""
    for capacity in (64, 128):
        wide = [
            width
            for width in (32, 64, 128, 256)
            if width <= max(sizes.batches) and tiles._proven_decode(width, capacity)
        ]
        report.figure(f"{name}_rows_alike_at_{capacity}_keys", max(wide, default=TILE_ROWS), "rows of a pass")
    report.figure(f"{name}_prompts_alike", tiles.prompts(8, 32), "prompts of 32 tokens that may share a prefill")


def varied(count: int, sizes: RepeatedSizes) -> list[SampleRequest]:
    """Samples with prompts of several lengths."""
    random = np.random.default_rng(1)
    return [
        SampleRequest(
            SampleKey(0, index, 0),
            random.integers(1, sizes.shape.vocabulary, random.integers(2, sizes.prompt + 1)).astype(np.int32),
            index + 1,
            sizes.tokens,
        )
        for index in range(count)
    ]


def engine_of(model: Any, rows: int, sizes: RepeatedSizes) -> TorchEngine:
    limits = EngineLimits(rows, sizes.prompt, sizes.tokens)
    return TorchEngine(model, decode.EndlessText(), SamplingParameters(), limits, deterministic=True)


def answers(engine: TorchEngine, samples: list[SampleRequest]) -> dict[int, ResponsePart]:
    """Whole responses by sample."""
    engine.submit(samples)
    done: dict[int, ResponsePart] = {}
    while engine.held:
        done |= {response.key.sample: response for response in engine.step().finished}
    return done


def resumed(model: Any, samples: list[SampleRequest], sizes: RepeatedSizes) -> dict[int, ResponsePart]:
    """Decoded half way, withdrawn, and to the end by another engine."""
    engine = engine_of(model, TILE_ROWS, sizes)
    engine.submit(samples)
    for _ in range(sizes.tokens // 2):
        engine.step()
    by_number = {sample.key.sample: sample for sample in samples}
    parts = [
        replace(
            by_number[part.key.sample],
            tokens=part.tokens,
            log_probabilities=part.log_probabilities,
            versions=part.versions,
        )
        for part in engine.withdraw()
    ]
    return answers(engine_of(model, TILE_ROWS, sizes), parts)


def compare(
    report: Report, name: str, way: str, wanted: dict[int, ResponsePart], found: dict[int, ResponsePart]
) -> None:
    """One row: how many samples kept their tokens, and how many their bits."""
    both = sorted(wanted.keys() & found.keys())
    tokens = sum(wanted[index].tokens.tolist() == found[index].tokens.tolist() for index in both)
    bits = sum(wanted[index].log_probabilities.tobytes() == found[index].log_probabilities.tobytes() for index in both)
    report.row("kept", dtype=name, way=way, samples=len(both), same_tokens=tokens, same_bits=bits)
    if name == "float32":
        report.check(f"float32, {way}: same tokens", tokens == len(both), f"{tokens} of {len(both)} samples")


def scored(model: Any, sizes: RepeatedSizes, report: Report, name: str) -> None:
    """Block by block, the same sample twice among others."""
    scorer = LogProbabilityScorer(model, 1.0, model.device, blocks=True)
    random = np.random.default_rng(2)
    samples = [
        ScoringSample(
            key=SampleKey(0, index, 0),
            prompt=random.integers(1, sizes.shape.vocabulary, 5).astype(np.int32),
            response=random.integers(1, sizes.shape.vocabulary, 60 + index).astype(np.int32),
            prompt_text="",
            response_text="",
            record="{}",
        )
        for index in range(4)
    ]
    together = scorer.score(samples)
    alone = [scorer.score([sample])[0] for sample in reversed(samples)][::-1]
    same = sum(one.tobytes() == other.tobytes() for one, other in zip(together, alone, strict=True))
    report.check(f"{name}: scores keep their bits, alone and beside others", same == len(samples), f"{same} of 4")


STEP = CheckStep(
    "deterministic",
    "what deterministic mode promises on a CPU: same tokens in float32 here, and by figures how many keep their bits",
    run,
    small=RepeatedSizes(TINY, batches=(32,), prompt=12, tokens=6),
    gpu=RepeatedSizes(HALF_BILLION, batches=(16, 32, 64, 128), prompt=48, tokens=64),
    limit_seconds=90,
    small_limit_seconds=180,
    gpu_gigabytes=12,
)
