"""Do drafts change what is drawn? Chi-square tests of tokens that the torch engine verified, against tokens without.

    python benchmarks/draft_distribution.py --json [--draws 1000000] [--modes fast deterministic] [--dtypes Float32]

A random policy of five words answers one prompt with four tokens, so that there are 625 responses and each is seen
often. The same engine decodes `--draws` tokens without drafts by some random keys, and as many by other keys, once
without and once with drafts of one to four tokens: by a drafter that guesses, and by one that knows the responses and
is right six times in ten, so that what is drafted depends on what will be drawn. Compared are the counts of responses:
with drafts against those without by other keys (chi-square of two samples), and against the law that transformers
gives in float32 (which is another law where the engine computes in bfloat16, and is then left out). `deviation` is the
statistic in standard deviations of what it has where nothing differs, and `probability` that of one as large or
larger. `parted` are responses that have another token than without drafts by the same key. Last line of --json: one
object.
"""

import argparse
import json
import math
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import transformers
from tokenizers import Tokenizer, models

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.known_responses import KnownResponses

from rlhf_api.samples import SampleKey, SampleRequest, TokenArray
from rlhf_workers.devices.device import device_name
from rlhf_workers.generation.engine import EngineLimits, SamplingParameters
from rlhf_workers.generation.speculation.drafter import Draft, Drafter, DraftRequest
from rlhf_workers.generation.speculation.speculator import Speculator
from rlhf_workers.generation.torch_engine.buckets import pass_widths
from rlhf_workers.generation.torch_engine.engine import TorchEngine
from rlhf_workers.models.loading import load_causal_lm, load_tokenizer
from rlhf_workers.models.precision import DTYPES

Ints = npt.NDArray[np.int64]

WORDS: Final = 5
POSITIONS: Final = 4
"""Tokens of a response."""
RESPONSES: Final = WORDS**POSITIONS
PROMPT: Final = np.array([1], np.int32)
BATCH: Final = 512
"""Samples at once."""
KNOWN: Final = 0.6
"""Acceptance of the drafter that knows the responses."""
FEWEST: Final = 10
"""Responses that are expected of a cell at least; the others are counted together."""


class Guesses:
    """A drafter that says words at random, some more often than others, and as many of them as it likes."""

    name = "Guesses"

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        self._likes = self._random.dirichlet(np.full(WORDS, 2.0))

    def begin(self, request: SampleRequest) -> None:
        """See Drafter."""

    def extend(self, key: SampleKey, tokens: TokenArray) -> None:
        """See Drafter."""

    def end(self, key: SampleKey) -> None:
        """See Drafter."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """See Drafter."""
        words = self._random.choice(WORDS, (len(requests), POSITIONS), p=self._likes).astype(np.int32)
        lengths = self._random.integers(1, POSITIONS + 1, len(requests))
        return [Draft(row[:length], 0) for row, length in zip(words, lengths, strict=True)]


def write_policy(folder: Path) -> Path:
    """A random Llama of five words, neither flat nor sharp."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.12,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"<{index}>": index for index in range(WORDS)}, unk_token="<0>"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<0>").save_pretrained(folder)
    return folder


def law(folder: Path) -> npt.NDArray[np.float64]:
    """Return the probability of each response, float64 [RESPONSES], by passes of transformers in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    before = torch.from_numpy(PROMPT.astype(np.int64))[None]
    probability = torch.ones(1, dtype=torch.float64)
    for _ in range(POSITIONS):
        with torch.inference_mode():
            following = model(before, use_cache=False).logits[:, -1].double().softmax(-1)
        probability = (probability[:, None] * following).flatten()
        words = torch.arange(WORDS).repeat(len(before))[:, None]
        before = torch.cat([before.repeat_interleave(WORDS, 0), words], 1)
    found: npt.NDArray[np.float64] = probability.numpy()
    return found


def build(folder: Path, dtype: torch.dtype, *, deterministic: bool) -> TorchEngine:
    """The engine as a job has it."""
    model = load_causal_lm(
        str(folder),
        field="policy",
        dtype=dtype,
        device=torch.device("cpu"),
        attention="eager" if deterministic else "sdpa",
    )
    limits = EngineLimits(BATCH, len(PROMPT), POSITIONS)
    return TorchEngine(
        model, load_tokenizer(str(folder), "policy"), SamplingParameters(), limits, deterministic=deterministic
    )


def draw(engine: TorchEngine, keys: Ints, drafter: Drafter | None) -> tuple[Ints, float]:
    """Return the number of the response by each key [n], and the share of drafted tokens that was accepted."""
    widths = pass_widths(BATCH * (POSITIONS + 1), tiled=engine.deterministic, static=False)
    speculator = None if drafter is None else Speculator([drafter], mode="Fixed", longest=POSITIONS, widths=widths)
    engine.draft_by(speculator)
    engine.submit(
        [SampleRequest(SampleKey(0, at, 0), PROMPT, int(key), POSITIONS) for at, key in enumerate(keys.tolist())]
    )
    tokens = np.zeros((len(keys), POSITIONS), np.int64)
    while engine.held:
        for response in engine.step().finished:
            tokens[response.key.sample] = response.tokens
    engine.draft_by(None)
    totals = speculator.totals if speculator is not None else None
    accepted = 0.0 if totals is None else float(totals.accepted.sum() / max(1, totals.drafted.sum()))
    return tokens @ WORDS ** np.arange(POSITIONS - 1, -1, -1), accepted


def against_law(drawn: Ints, probability: npt.NDArray[np.float64]) -> dict[str, float]:
    """Chi-square of responses [n] against the probability of each."""
    found, expected = np.bincount(drawn, minlength=RESPONSES).astype(np.float64), probability * len(drawn)
    rare = expected < FEWEST
    found, expected = (np.append(part[~rare], part[rare].sum()) for part in (found, expected))
    seen = expected > 0
    return verdict(float(((found - expected)[seen] ** 2 / expected[seen]).sum()), int(seen.sum()) - 1)


def against_others(drawn: Ints, others: Ints) -> dict[str, float]:
    """Chi-square of two equally large sets of responses."""
    found, other = (np.bincount(part, minlength=RESPONSES).astype(np.float64) for part in (drawn, others))
    rare = found + other < 2 * FEWEST
    found, other = (np.append(part[~rare], part[rare].sum()) for part in (found, other))
    seen = found + other > 0
    return verdict(float(((found - other)[seen] ** 2 / (found + other)[seen]).sum()), int(seen.sum()) - 1)


def verdict(square: float, freedom: int) -> dict[str, float]:
    """Wilson and Hilferty: the cube root of a chi-square variable is nearly normal."""
    spread = 2 / (9 * freedom)
    deviation = ((square / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return {
        "square": round(square, 1),
        "freedom": freedom,
        "deviation": round(deviation, 2),
        "probability": round(0.5 * math.erfc(deviation / math.sqrt(2)), 4),
    }


def compare(folder: Path, dtype: str, mode: str, draws: int) -> list[dict[str, Any]]:
    """Each drafter on one engine."""
    engine = build(folder, DTYPES[dtype], deterministic=mode == "deterministic")  # type: ignore[index]
    count = draws // POSITIONS
    keys = np.random.default_rng(1).integers(2**62, size=2 * count)
    without, _ = draw(engine, keys[:count], None)
    same_keys, _ = draw(engine, keys[count:], None)
    known = np.stack(np.unravel_index(same_keys, (WORDS,) * POSITIONS), axis=1)
    drafters: tuple[Drafter, ...] = (Guesses(), KnownResponses(KNOWN, dict(enumerate(known.tolist())), WORDS))
    result = []
    for drafter in drafters:
        began = time.perf_counter()
        drawn, accepted = draw(engine, keys[count:], drafter)
        row: dict[str, Any] = {
            "precision": dtype,
            "mode": mode,
            "drafter": drafter.name,
            "tokens": count * POSITIONS,
            "accepted": round(accepted, 3),
            "without": against_others(drawn, without),
            "parted": int((drawn != same_keys).sum()),
            "seconds": round(time.perf_counter() - began, 1),
        }
        if dtype == "Float32":
            row["law"] = against_law(drawn, law(folder))
        result.append(row)
        print(json.dumps(row), flush=True)
    return result


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1_000_000, help="tokens of each way")
    parser.add_argument("--modes", nargs="*", default=["fast", "deterministic"], choices=["fast", "deterministic"])
    parser.add_argument("--dtypes", nargs="*", default=["Float32", "BFloat16"], choices=list(DTYPES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one object as the last line")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory(prefix="rlhf-draws-") as scratch:
        folder = write_policy(Path(scratch))
        rows = [
            row
            for dtype in arguments.dtypes
            for mode in arguments.modes
            if mode == "fast" or dtype == "Float32"  # the engine refuses the other
            for row in compare(folder, dtype, mode, arguments.draws)
        ]
    if arguments.json:
        machine = {"device": device_name(torch.device("cpu")), "machine": platform.machine()}
        print(json.dumps(machine | {"threads": arguments.threads, "rows": rows}))


if __name__ == "__main__":
    main()
