"""Creates the inputs of the pipeline: an untrained policy (a real Hugging Face folder) and three JSONL files.

The task is that of the quickstart: the right response to `3+5+2=` is `08+2=10`. demonstrations.jsonl shows responses,
half of them with a random sum at the end. pairs.jsonl has a right and a wrong response for each prompt. prompts.jsonl
has prompts only. So SFT teaches the form of an answer, the reward model learns what is right, and PPO teaches the
policy to say it. Never downloads anything. The same seed gives the same files.
"""

import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quickstart"))

from prepare import HIDDEN, POSITIONS, build_policy, build_tokenizer, demonstration, made_by_command, prompts

FORMAT = 1
"""Version of this script's output. Increase it with every change, so that stale files are created again."""
DEMONSTRATIONS = 16384
PAIRS = 16384
PROMPTS = 2048
NOISE = 0.5
"""Share of demonstrations that end in a random number, which SFT leaves for PPO to correct."""
NEAR = 0.5
"""Share of wrong answers that are off by at most three."""


def demonstrations(seed: int, count: int) -> list[dict[str, str]]:
    """Return prompts with responses, a share NOISE of which end in a random number."""
    rng = random.Random(f"demonstrations-{seed}")
    shown = (demonstration(rng, noise=NOISE) for _ in range(count))
    return [{"prompt": prompt, "response": said} for prompt, said, _ in shown]


def pairs(seed: int, count: int) -> list[dict[str, str]]:
    """Return prompts with a right response and one that ends in another number."""
    rng, result = random.Random(f"pairs-{seed}"), []
    while len(result) < count:
        prompt, right, answer = demonstration(rng, noise=0.0)
        near = int(answer) + rng.choice((-3, -2, -1, 1, 2, 3))  # typical of a policy that has learned a little
        wrong = f"{max(0, near) if rng.random() < NEAR else rng.randrange(30):02d}"
        if wrong != answer:
            result.append({"prompt": prompt, "chosen": right, "rejected": right[: -len(answer)] + wrong})
    return result


def prepare(folder: Path, seed: int, creation: Mapping[str, int]) -> None:
    """Create base/ and the three files in `folder`."""
    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    build_policy(tokenizer, POSITIONS, HIDDEN, layers=2).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    files = {
        "demonstrations": demonstrations(seed, DEMONSTRATIONS),
        "pairs": pairs(seed, PAIRS),
        "prompts": prompts(seed, PROMPTS),
    }
    for name, records in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "made.json").write_text(json.dumps(creation))


if __name__ == "__main__":
    made_by_command(__file__, __doc__, FORMAT, prepare)
