"""Creates the inputs of the long-answers example: a small policy, a draft model for it, and a JSONL prompt file.

The task is to count aloud up to GOAL. The right response to `137+9=` is `146;146+9=155;155+9=164;` and so on up to 200
or more. Prompts start below 40, so right answers have 175 to 495 tokens. Most of a line repeats the line before.
Supervised steps warm up the policy: first on a few lines of a count, then on whole answers, and last on whole answers
with random sums. So the policy knows how to answer but adds up wrong now and then, which is where reinforcement
learning starts. The draft model has about a seventh of the parameters and the same training. Never downloads anything.
The same seed gives the same files.
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
"""Upper limit (exclusive) of the number at the start of a prompt."""
POSITIONS = 640
SIZES = {"policy": (64, 2), "draft": (32, 1)}
"""Hidden size and number of layers."""
SHORT_STEPS = 320
"""Number of training steps on SHORT lines of a count."""
LONG_STEPS = 40
"""Number of training steps on whole answers, which are longer than the SHORT ones."""
NOISY_STEPS = 20
"""Number of training steps on whole answers with random sums, which spread the policy's probability over them."""
NOISE = 0.1
"""Share of the sums that are random in these steps."""
SHORT = 6
SHORT_BATCH = 48
LONG_BATCH = 8
PEAK_LEARNING_RATE = 6e-3
WARM_UP_STEPS = 30
FORMAT = 1
"""Version of this script's output. Increase it with every change, so that stale files are created again."""


def demonstration(rng: random.Random, *, noise: float = 0.0, short: bool = False) -> tuple[str, str, bool]:
    """Return (prompt, response, whether it is whole); each sum is random with probability `noise`."""
    step = rng.randint(SMALLEST_STEP, 9)
    total = rng.randrange(GOAL if short else FIRST_BELOW)
    prompt, said = f"{total:03d}+{step}=", ""
    while total < GOAL and not (short and len(said) >= SHORT * 10):
        total = min(total + rng.randint(1, 12), GOAL + 9) if rng.random() < noise else total + step
        said += f"{total:03d};" + (f"{total:03d}+{step}=" if total < GOAL else "")
    return prompt, said, total >= GOAL


def lessons(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
    """Yield (token ids, labels, learning rate) of every supervised step."""
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
    """Return prompt records; the right answer follows from the prompt."""
    rng = random.Random(f"prompts-{seed}")
    return [{"prompt": demonstration(rng)[0]} for _ in range(count)]


def prepare(folder: Path, seed: int, creation: Mapping[str, int]) -> None:
    """Create policy/, draft/ and prompts.jsonl in `folder`."""
    tokenizer = build_tokenizer(CHARACTERS)
    models: dict[str, LlamaForCausalLM] = {}
    for name, (hidden, layers) in SIZES.items():
        torch.manual_seed(seed)
        models[name] = build_policy(tokenizer, POSITIONS, hidden, layers)
        with shown_progress(f"warming up {name}", SHORT_STEPS + LONG_STEPS + NOISY_STEPS) as advance:
            teach(models[name], lessons(tokenizer, seed), advance)
    write(folder, tokenizer, models, prompts(seed, count=48), creation)


if __name__ == "__main__":
    made_by_command(__file__, __doc__, FORMAT, prepare)
