"""The settings of benchmarks/peers.py: models, prompts, rewards, and this project's job of each.

Rule: both sides get the same files, and the numbers of the same `PeerSetting`.
"""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from examples.quickstart.prepare import build_policy, build_tokenizer

ROOT: Final = Path(__file__).resolve().parents[1]
CHARACTERS: Final = "".join(map(chr, range(32, 127)))
DIGITS: Final = '''\
def score(prompt, response, record):
    """Share of characters of the response that are digits."""
    return sum(character.isdigit() for character in response) / max(1, len(response))
'''


@dataclass(frozen=True)
class PeerSetting:
    """Training that both sides run."""

    prepare: Callable[[Path], None]
    """Fills a folder with assets/policy, assets/prompts.jsonl and reward.py."""
    iterations: int
    warm: int
    """Number of first iterations, at least one, that no median includes: caches fill, and costs are learned."""
    goal: float
    """Reward whose time is reported."""
    batch: int
    mini_batch: int
    micro_batch: int
    """Samples of one backward pass, over all threads, on both sides."""
    prompt: int
    response: int
    learning_rate: float
    threads: int
    """Threads of each of our workers; 0 means as many as the peer's only process."""
    group: int = 8
    kl: float = 0.01
    clip: float = 0.2
    seed: int = 7


def quickstart(folder: Path) -> None:
    """Create the quickstart's policy of 187 thousand parameters, its sums and its reward."""
    for source in (ROOT / "examples" / "quickstart").glob("*.py"):
        shutil.copy(source, folder)
    subprocess.run([sys.executable, folder / "prepare.py"], check=True, stdout=subprocess.DEVNULL)


def untrained_llama(folder: Path) -> None:
    """Create an untrained Llama of 10.6 million parameters; at first about one token in a hundred ends a response."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer(CHARACTERS)
    policy = build_policy(tokenizer, positions=320, hidden=512, layers=4)
    policy.save_pretrained(folder / "assets" / "policy")
    tokenizer.save_pretrained(folder / "assets" / "policy")
    rng = random.Random(0)
    asked = ("".join(rng.choice(CHARACTERS) for _ in range(rng.randint(4, 16))) for _ in range(512))
    lines = [json.dumps({"prompt": text}) + "\n" for text in asked]
    (folder / "assets" / "prompts.jsonl").write_text("".join(lines))
    (folder / "reward.py").write_text(DIGITS)


SETTINGS: Final = {
    "quickstart": PeerSetting(quickstart, 60, 5, 0.5, 128, 64, 64, 8, 12, 3e-4, threads=1),
    "llama-10m": PeerSetting(untrained_llama, 8, 2, 0.2, 64, 64, 16, 16, 256, 1e-4, threads=0),
}


def manifest(setting: PeerSetting, threads: int) -> dict[str, Any]:
    """Return our job: one generation worker, one inference worker, one rank."""
    threads = setting.threads or threads
    fields = {"groupSize": setting.group, "klCoefficient": setting.kl, "clipRange": setting.clip}
    fields |= {"epochs": 1, "miniBatchSize": setting.mini_batch}
    optimizer = {"schedule": "Linear", "learningRate": setting.learning_rate}
    spec = {
        "algorithm": {"grpo": fields},
        "iterations": setting.iterations,
        "seed": setting.seed,
        "models": {
            "actor": {"path": "assets/policy"},
            "reward": {"function": {"file": "reward.py", "name": "score"}},
        },
        "prompts": {"path": "assets/prompts.jsonl"},
        "rollout": {
            "batchSize": setting.batch,
            "maxPromptTokens": setting.prompt,
            "maxResponseTokens": setting.response,
        },
        "generation": {"replicas": 1, "maxBatchSize": setting.batch, "cpuThreads": threads},
        "inference": {"replicas": 1, "cpuThreads": threads},
        "training": {"microBatchSize": setting.micro_batch, "cpuThreads": threads, "optimizer": optimizer},
        "checkpoints": {"path": "checkpoints", "every": setting.iterations},
    }
    return {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "peers"}, "spec": spec}
