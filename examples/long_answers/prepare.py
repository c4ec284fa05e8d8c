"""Makes what the long-answers example trains: a small policy, a draft model for it, and a JSONL prompt file.

The task is counting up to GOAL aloud: `137+9=` is to be answered `146;146+9=155;155+9=164;` and so on up to 200 or
more. Prompts begin below 40, so answers have 180 to 510 tokens, and most of a step repeats the step before. The policy
is warmed up by supervised steps: on a few steps of the count at a time, then on whole answers, and last on whole
answers with wrong sums. So it knows how to answer and adds up wrong now and then, which is where reinforcement learning
starts. The draft model has a fifth of its parameters and saw the same. Never fetches anything; the same seed gives the
same files.
"""

import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from quickstart.prepare import batch, build_policy, build_tokenizer, made_by_command, shown_progress, teach, write

CHARACTERS = "0123456789+=;"
GOAL = 200
SMALLEST_STEP = 4
FIRST_BELOW = 40
"""What prompts begin below."""
POSITIONS = 640
SIZES = {"policy": (64, 2), "draft": (32, 1)}
"""Hidden size and layers."""
SHORT_STEPS = 320
"""Steps on SHORT steps of a count, anywhere in it: enough for nine in ten of them to be right."""
LONG_STEPS = 40
"""Steps on whole answers, which are longer than what was seen before."""
NOISY_STEPS = 20
"""Steps on whole answers with wrong sums: enough to spread the policy's probability over them."""
NOISE = 0.1
"""Share of the sums that are wrong there."""
SHORT = 6
SHORT_BATCH = 48
LONG_BATCH = 8
PEAK_LEARNING_RATE = 6e-3
WARM_UP_STEPS = 30
FORMAT = 1
"""Rises with every change of what this script makes, so that stale files are made again."""


def demonstration(rng: random.Random, *, noise: float = 0.0, short: bool = False) -> tuple[str, str, bool]:
    """(prompt, response, whether it is whole); each sum is a wrong one with probability `noise`."""
    step = rng.randint(SMALLEST_STEP, 9)
    total = rng.randrange(GOAL if short else FIRST_BELOW)
    prompt, said = f"{total:03d}+{step}=", ""
    while total < GOAL and not (short and len(said) >= SHORT * 10):
        total = min(total + rng.randint(1, 12), GOAL + 9) if rng.random() < noise else total + step
        said += f"{total:03d};" + (f"{total:03d}+{step}=" if total < GOAL else "")
    return prompt, said, total >= GOAL


def lessons(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
    """(token ids, labels, learning rate) of every supervised step."""
    rng = random.Random(seed)
    steps = SHORT_STEPS + LONG_STEPS + NOISY_STEPS
    for step in range(steps):
        short, noisy = step < SHORT_STEPS, step >= SHORT_STEPS + LONG_STEPS
        count, noise = SHORT_BATCH if short else LONG_BATCH, NOISE if noisy else 0.0
        shown = [demonstration(rng, noise=noise, short=short) for _ in range(count)]
        rate = PEAK_LEARNING_RATE * (1 - 0.9 * step / steps) * min(1.0, (step + 1) / WARM_UP_STEPS)
        pairs = [(prompt, said + tokenizer.eos_token * whole) for prompt, said, whole in shown]
        yield *batch(tokenizer, pairs), rate


def prompts(seed: int, count: int) -> list[dict[str, str]]:
    """Prompt records; the right answer follows from the prompt."""
    rng = random.Random(f"prompts-{seed}")
    return [{"prompt": demonstration(rng)[0]} for _ in range(count)]


def prepare(folder: Path, seed: int, made: Mapping[str, int]) -> None:
    """Fills `folder` with policy/, draft/ and prompts.jsonl."""
    tokenizer = build_tokenizer(CHARACTERS)
    models: dict[str, LlamaForCausalLM] = {}
    for name, (hidden, layers) in SIZES.items():
        torch.manual_seed(seed)
        models[name] = build_policy(tokenizer, POSITIONS, hidden, layers)
        with shown_progress(f"warming up {name}", SHORT_STEPS + LONG_STEPS + NOISY_STEPS) as advance:
            teach(models[name], lessons(tokenizer, seed), advance)
    write(folder, tokenizer, models, prompts(seed, count=48), made)


if __name__ == "__main__":
    made_by_command(__file__, __doc__, FORMAT, prepare)
