"""Measures how far two near-equal policies draw the same tokens: by inverse CDF, as today, and by Gumbel-max.

    python -m benchmarks.policy_parting [--policies FOLDER FOLDER ...] [--iterations 6] [--learning-rate 3e-5] [--json]

Both laws draw a token by noise of (random key, position). The inverse cumulative distribution takes one uniform, in the
order of ids (`rlhf_workers.generation.sampling`). Gumbel-max takes the id with the largest log-probability + Gumbel
noise of (key, position, id). The first policy of a pair decodes; at each prefix the second one draws with the same
noise. `epsilon` is the share of positions where it draws another token, so a draft ahead is right for about 1 / epsilon
tokens. `tv` is the mean total variation of both distributions: up to chance, no law has a smaller epsilon.

`trained`: pairs of successive folders, or else of the versions of a short job (`benchmarks.drafts_ahead`). `random`:
pairs of random logits over 4,096 ids at given entropies, the second with normal noise of deviation `noise` added to the
logits.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from benchmarks.drafts_ahead import manifest_of, settings
from tests.support.jobs.chaos import run_job
from transformers import AutoModelForCausalLM

from rlhf_workers.generation.engine import SamplingParameters
from rlhf_workers.generation.sampling import sample

SEQUENCES: Final = 256
TOKENS: Final = 12
IDS: Final = 4096
ENTROPIES: Final = (0.3, 0.9, 3.1)
NOISE: Final = (0.003, 0.03)
ROWS: Final = 4000
Law = Callable[[torch.Tensor, np.random.Generator], Callable[[torch.Tensor], torch.Tensor]]
"""From logits [n, ids] and a source of noise to the draw of tokens [n] from logits by this noise."""


def inverse(logits: torch.Tensor, noise: np.random.Generator) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the draw of the torch engine by one uniform a row."""
    uniforms = torch.from_numpy(noise.random(len(logits)))
    return lambda other: sample(other, uniforms, SamplingParameters())[0]


def gumbel(logits: torch.Tensor, noise: np.random.Generator) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the draw by the largest logit with Gumbel noise."""
    gumbels = torch.from_numpy(noise.gumbel(size=tuple(logits.shape)))
    return lambda other: (torch.log_softmax(other.double(), -1) + gumbels).argmax(-1)


LAWS: Final[dict[str, Law]] = {"inverse": inverse, "gumbel": gumbel}


def entropy(logits: torch.Tensor) -> float:
    """Return the mean entropy of rows of logits in nats."""
    return float(torch.distributions.Categorical(logits=logits.double()).entropy().mean())


def variation(logits: torch.Tensor, other: torch.Tensor) -> float:
    """Return the mean total variation of the distributions of rows."""
    difference = torch.softmax(logits.double(), -1) - torch.softmax(other.double(), -1)
    return float(difference.abs().sum(-1).mean() / 2)


def compared(pairs: Sequence[tuple[str, torch.Tensor, torch.Tensor]], differ: dict[str, float]) -> dict[str, float]:
    """Return figures of pairs of logits, with the share of differing draws by law."""
    tv = float(np.mean([variation(first, second) for _, first, second in pairs]))
    found = {"entropy": float(np.mean([entropy(first) for _, first, _ in pairs])), "tv": tv}
    for law, epsilon in differ.items():
        found[f"epsilon_{law}"] = epsilon
        found[f"epsilon_{law}_over_tv"] = epsilon / tv if tv else math.nan
    return found


@torch.inference_mode()
def trained_pair(first: Any, second: Any, prompts: torch.Tensor) -> dict[str, float]:
    """Let the first policy decode by each law; compare the second one's draws at the same prefixes."""
    pairs, differ = [], {}
    for name, law in LAWS.items():
        noise, text, different = np.random.default_rng(1), prompts, 0
        for _ in range(TOKENS):
            logits, other = (policy(text).logits[:, -1].float() for policy in (first, second))
            draw = law(logits, noise)
            tokens = draw(logits)
            different += int((draw(other) != tokens).sum())
            pairs.append((name, logits, other))
            text = torch.cat([text, tokens[:, None]], dim=1)
        differ[name] = different / (TOKENS * len(prompts))
    return compared(pairs, differ)


def random_pairs() -> Iterator[dict[str, float]]:
    """Yield figures of random logits whose mean entropy is nearly as wanted."""
    rng = np.random.default_rng(2)
    drawn = torch.from_numpy(rng.normal(size=(ROWS, IDS)))
    for wanted in ENTROPIES:
        low, high = 0.1, 40.0
        for _ in range(20):  # a larger scale has a smaller entropy
            middle = (low + high) / 2
            low, high = (middle, high) if entropy(middle * drawn[:200]) > wanted else (low, middle)
        logits = low * drawn
        for size in NOISE:
            other = logits + torch.from_numpy(rng.normal(scale=size, size=(ROWS, IDS)))
            differ = {}
            for name, law in LAWS.items():
                draw = law(logits, np.random.default_rng(3))
                differ[name] = float((draw(logits) != draw(other)).double().mean())
            yield {"noise": size} | compared([("", logits, other)], differ)


def policies_of(job: Path, options: argparse.Namespace) -> list[Path]:
    """Train a short job; return the folders of its versions."""
    manifest, run = manifest_of(job / "job", options.quickstart), job / "run"
    common = settings(options.iterations, options.learning_rate, run, 1)
    run_job(manifest, run, settings=(*common, "generation.speculation.mode=Disabled"))
    return [folder / "actor" for folder in sorted(run.glob("checkpoints/iteration-*"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="+", type=Path, default=(), help="folders of successive versions")
    parser.add_argument("--iterations", type=int, default=6, help="of the job that is trained without --policies")
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument("--quickstart", type=Path, help="folder of a quickstart after its prepare.py")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        folders = options.policies or policies_of(Path(folder), options)
        models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in folders]
    prompts = torch.randint(4, models[0].config.vocab_size, (SEQUENCES, 4), generator=torch.Generator().manual_seed(5))
    results = {
        "trained": [trained_pair(first, second, prompts) for first, second in pairwise(models)],
        "random": list(random_pairs()),
    }
    for kind, rows in results.items():
        for row in rows:
            print(f"{kind}:", ", ".join(f"{name} {value:.4g}" for name, value in row.items()))
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
