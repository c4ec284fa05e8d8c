"""Creates the inputs of the calculator example: a small policy that may call a calculator, and a JSONL prompt file.

The task is multiplication. The right response to `37*84=` is `3108`. To get it, the policy calls the calculator with
`37*84` and repeats the number of its answer, `:3108;`. Supervised steps warm up the policy; in the last ones many
questions and answers are random. So the policy knows how to ask but errs, which is where reinforcement learning starts.
Never downloads anything. The same seed gives the same files.
"""

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from quickstart.prepare import batch, build_policy, build_tokenizer, made_by_command, shown_progress, teach, write

CHARACTERS = "0123456789*=:;?"
CLEAN_STEPS = 130
"""Number of steps on right demonstrations."""
NOISY_STEPS = 4
"""Number of steps with wrong demonstrations, which spread the policy's probability over them."""
NOISE = 0.35
"""Share of the questions, and of the answers, that are random in these steps."""
HIDDEN = 64
POSITIONS = 48
BATCH = 64
PEAK_LEARNING_RATE = 6e-3
WARM_UP_STEPS = 20
FORMAT = 1
"""Version of this script's output. Increase it with every change, so that stale files are created again."""


def demonstration(rng: random.Random, end: str, *, noise: float = 0.0) -> tuple[str, str, str]:
    """Return (prompt, response of two turns with the calculator's output between them, right answer)."""
    first, second = rng.randrange(10, 100), rng.randrange(10, 100)
    asked, other = (first, second), (rng.randrange(10, 100), rng.randrange(10, 100))
    if rng.random() < noise:
        asked = other
    product = f"{asked[0] * asked[1]:04d}"
    said = f"{rng.randrange(10000):04d}" if rng.random() < noise else product
    response = f"{asked[0]}*{asked[1]}{end}:{product};{said}{end}"
    return f"{first}*{second}=", response, f"{first * second:04d}"


def warm_up(tokenizer: PreTrainedTokenizerFast, seed: int, advance: Callable[[float], None]) -> LlamaForCausalLM:
    """Return a policy after CLEAN_STEPS + NOISY_STEPS supervised steps."""
    torch.manual_seed(seed)
    rng, steps = random.Random(seed), CLEAN_STEPS + NOISY_STEPS

    def lessons() -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
        for step in range(steps):
            noise = NOISE if step >= CLEAN_STEPS else 0.0
            shown = [demonstration(rng, tokenizer.eos_token, noise=noise)[:2] for _ in range(BATCH)]
            rate = PEAK_LEARNING_RATE * (1 - 0.8 * step / steps) * min(1.0, (step + 1) / WARM_UP_STEPS)
            yield *batch(tokenizer, shown), rate

    policy = build_policy(tokenizer, POSITIONS, HIDDEN, layers=2)
    teach(policy, lessons(), advance)
    return policy


def prepare(folder: Path, seed: int, creation: Mapping[str, int]) -> None:
    """Create policy/ and prompts.jsonl, with the right answers, in `folder`."""
    tokenizer = build_tokenizer(CHARACTERS)
    with shown_progress("warming up the policy", CLEAN_STEPS + NOISY_STEPS) as advance:
        policy = warm_up(tokenizer, seed, advance)
    rng = random.Random(f"prompts-{seed}")
    asked = (demonstration(rng, tokenizer.eos_token) for _ in range(1024))
    records = [{"prompt": prompt, "answer": answer} for prompt, _, answer in asked]
    write(folder, tokenizer, {"policy": policy}, records, creation)


if __name__ == "__main__":
    made_by_command(__file__, __doc__, FORMAT, prepare)
