"""Deterministic mode on this device, where it is not guaranteed: which of its guarantees on a CPU hold here.

A sample is decoded alone, in batches of several sizes and among other neighbours, resumed from its tokens, and scored
alone and with others; tokens are compared, and log-probabilities to the last bit.
"""

from dataclasses import dataclass
from typing import Any

import pytest
from tests.gpu.decoding import engine_of, load, requests, to_score
from tests.gpu.models import HALF_BILLION, TINY
from tests.gpu.timing import name_of
from tests.support.workers.engine_driving import finish, resumed
from transformers import LlamaConfig

from gpu_check.plugin import CheckedMachine, Figures
from rlhf_common.samples import ResponsePart
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.torch_engine.buckets import TILE_ROWS
from rlhf_workers.generation.torch_engine.engine import TorchEngine
from rlhf_workers.generation.torch_engine.tiles import Tiles
from rlhf_workers.inference.model_scorer import LogProbabilityScorer

Responses = dict[int, ResponsePart]


@dataclass(frozen=True)
class RepeatedSizes:
    """Sizes of the model and of the decoded samples."""

    config: LlamaConfig
    batches: tuple[int, ...]
    prompt: int
    tokens: int


SMALL = RepeatedSizes(TINY, batches=(32,), prompt=12, tokens=6)
LARGE = RepeatedSizes(HALF_BILLION, batches=(16, 32, 64, 128), prompt=48, tokens=64)


@pytest.mark.gpu(seconds=90, gigabytes=12)
def test_deterministic(machine: CheckedMachine, figures: Figures) -> None:
    """Deterministic mode's promises of a CPU: same tokens in float32 here, and by figures how many keep their bits."""
    sizes = machine.sized(SMALL, LARGE)
    for dtype in reversed(machine.dtypes):
        model = load(machine, sizes.config, dtype)
        model.set_attn_implementation("eager")
        decode(machine, model, sizes, figures, name_of(dtype))
        score(model, sizes, figures, name_of(dtype))
        del model


def decode(machine: CheckedMachine, model: Any, sizes: RepeatedSizes, figures: Figures, name: str) -> None:
    """Compare tokens and bits by batch size; the check is of tokens in float32. Otherwise figures are recorded."""
    samples = requests(max(sizes.batches), sizes.prompt, sizes.tokens, sizes.config.vocab_size, shortest=2)

    def engine(rows: int) -> TorchEngine:
        return engine_of(model, rows, sizes.prompt, sizes.tokens, deterministic=True)

    try:
        alone = finish(engine(TILE_ROWS), samples[:TILE_ROWS])
    except WorkError as error:
        refused = not machine.cuda and name != "float32"
        expected = "refuses deterministic mode on a CPU" if refused else "starts in deterministic mode"
        figures.check(f"{name}: the engine {expected}", refused or machine.cuda, str(error))
        return
    tiles = engine(TILE_ROWS)._tiles
    assert tiles is not None
    widths_that_hold(tiles, sizes, figures, name)
    ways = {f"batch {rows}": (rows, samples[:rows]) for rows in sizes.batches}
    ways["other neighbours"] = (TILE_ROWS, samples[: TILE_ROWS // 2] + samples[-TILE_ROWS // 2 :])
    ways["the other way round"] = (TILE_ROWS, samples[:TILE_ROWS][::-1])
    for way, (rows, chosen) in ways.items():
        compare(figures, name, way, alone, finish(engine(rows), chosen))
    first = engine(TILE_ROWS)
    first.submit(samples[:TILE_ROWS])
    for _ in range(sizes.tokens // 2):
        first.step()
    parts = [resumed(samples[part.key.sample], part) for part in first.withdraw()]
    compare(figures, name, "resumed", alone, finish(engine(TILE_ROWS), parts))


def widths_that_hold(tiles: Tiles, sizes: RepeatedSizes, figures: Figures, name: str) -> None:
    """Record which wider passes gave the bits of a tile here."""
    widths = [width for width in (32, 64, 128, 256) if width <= max(sizes.batches)]
    for capacity in (64, 128):
        wide = [width for width in widths if tiles._proven_decode(width, capacity)]
        figures.add(f"{name}_rows_alike_at_{capacity}_keys", max(wide, default=TILE_ROWS), "rows of a pass")
    figures.add(f"{name}_prompts_alike", tiles.prompts(8, 32), "prompts of 32 tokens that may share a prefill")


def compare(figures: Figures, name: str, way: str, wanted: Responses, found: Responses) -> None:
    """Record how many samples have the same tokens, and how many the same bits."""
    both = sorted(wanted.keys() & found.keys())
    tokens = sum(wanted[index].tokens.tolist() == found[index].tokens.tolist() for index in both)
    bits = sum(wanted[index].log_probabilities.tobytes() == found[index].log_probabilities.tobytes() for index in both)
    figures.row("kept", dtype=name, way=way, samples=len(both), same_tokens=tokens, same_bits=bits)
    if name == "float32":
        figures.check(f"float32, {way}: same tokens", tokens == len(both), f"{tokens} of {len(both)} samples")


def score(model: Any, sizes: RepeatedSizes, figures: Figures, name: str) -> None:
    """Score block by block, the same samples together and alone."""
    scorer = LogProbabilityScorer(model, 1.0, model.device, blocks=True)
    samples = to_score(5, range(60, 64), sizes.config.vocab_size)
    together = scorer.score(samples)
    alone = [scorer.score([sample])[0] for sample in reversed(samples)][::-1]
    same = sum(part.tobytes() == other.tobytes() for part, other in zip(together, alone, strict=True))
    figures.check(f"{name}: scores keep their bits, alone and beside others", same == len(samples), f"{same} of 4")
