"""Nothing, oversampling, partial rollouts, decoding beside training, fusion, and fusion with oversampling on the same
long-tailed work: samples a second, and reward against time.

`python benchmarks/oversampling.py [--rounds 2] [--iterations 10] [--ways nothing partial] [--json]`. In every round one
whole GRPO job for each way, one after the other, which differ in `rollout.oversample`, `rollout.maxStaleness`,
`rollout.overlapTraining` and `fusion.interStage` alone. The policy is the one of
`long_tail_policy`: one response in fifteen takes a path on which it goes on twenty times as long. It is trained, by a
reward of the first few characters that either path can earn as well; a term for the divergence from the policy at first
holds lengths. Workers are of a stated speed (`paced_worker`), scoring as in scenario A of `long_tail` unless another is
given; training is as fast as the machine, or of a stated speed (`--training`). Samples a second are those that were
trained on, over the iterations after the first ones, in which workers start, costs are measured and lengths learned;
seconds count from their end.
What a batch says of the reward is that of the responses it kept. So rewards against time are those of checkpoints,
computed once the job is over, without sampling, from what the policy says follows which token: of all responses, none
cut off, and of those on the long path, which oversampling trains on less often. Partial rollouts carry what is cut off.
Nothing is trained on beside decoding before a checkpoint, so what overlaps is compared with few (`--points`).
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import pinned_job
from benchmarks.long_tail_job import MAX_TOKENS, ROWS, SCENARIOS, Scenario
from benchmarks.long_tail_policy import LONG, PROMPT, write_policy

from rlhf_coordinator.reports.trackers.metrics_jsonl import read_metrics

GROUP: Final = 4
"""Responses to a prompt: about one group in four has a long one."""
WARM_UP: Final = 2
"""Iterations of a job that no rate counts: costs are measured and lengths learned."""
WANTED: Final = "abc012"
"""Tokens that are rewarded: three of ten on either path."""
NOT_THERE: Final = 0.3
"""What a character that is not there counts: as much as one of the policy does at first."""
FIRST: Final = 4
"""Characters of a response that are looked at: no reward is had by saying less, or more."""
REWARD: Final = f'''\
def score(prompt, response, record):
    """How many of the first characters are wanted; one that is not there counts as one did at first."""
    first = response[:{FIRST}]
    return (sum(character in {WANTED!r} for character in first) + {NOT_THERE} * ({FIRST} - len(first))) / {FIRST}
'''
KL: Final = 0.1
"""Holds lengths to those of the policy at first, which the reward has no say in."""
DIRECTION: Final = 1e4
"""Length of the vector of a token."""
STALENESS: Final = 2
"""Versions; the longest responses take less than so many iterations more."""


@dataclass(frozen=True)
class TailHandling:
    """What a job does about its tail."""

    fused: bool
    oversampled: bool
    staleness: int = 0
    """Versions that carried tokens may be old."""
    overlapped: bool = False
    """An iteration decodes while the one before is trained on."""


WAYS: Final = {
    "nothing": TailHandling(fused=False, oversampled=False),
    "oversampling": TailHandling(fused=False, oversampled=True),
    "partial": TailHandling(fused=False, oversampled=True, staleness=STALENESS),
    "fusion": TailHandling(fused=True, oversampled=False),
    "overlap": TailHandling(fused=False, oversampled=False, overlapped=True),
    "both": TailHandling(fused=True, oversampled=True),
    "partial-1": TailHandling(fused=False, oversampled=True, staleness=1),
    "partial-4": TailHandling(fused=False, oversampled=True, staleness=4),
}
USUAL: Final = ("nothing", "oversampling", "partial", "fusion", "both")
"""Of them, those that are compared where none is named."""


def write_job(folder: Path, scenario: Scenario, way: TailHandling, seed: int, arguments: argparse.Namespace) -> Path:
    """Write models, prompts, reward and the resolved manifest, whose path is returned."""
    write_policy(folder / "policy", scenario.layers, length=DIRECTION)
    prompts = scenario.batch // GROUP
    manifest = pinned_job.write_job(
        folder,
        "oversampling",
        iterations=arguments.iterations,
        batch=scenario.batch,
        max_tokens=MAX_TOKENS,
        reference=scenario.scorer,
        seed=seed,
        algorithm={"grpo": {"miniBatchSize": scenario.batch // 2, "groupSize": GROUP, "klCoefficient": KL}},
        rollout={
            "batchSize": scenario.batch,
            "oversample": round(arguments.share * prompts) if way.oversampled else 0,
            "maxStaleness": way.staleness,
            "overlapTraining": "Enabled" if way.overlapped else "Disabled",
            "maxPromptTokens": 8,
            "maxResponseTokens": MAX_TOKENS,
        },
        generation={"replicas": scenario.workers, "maxBatchSize": ROWS, "speculation": {"mode": "Disabled"}},
        inference={"replicas": 0, "incremental": "Disabled"},
        fusion={"interStage": {"mode": "Auto" if way.fused else "Disabled", "balance": "Disabled"}},
        training={"microBatchSize": 16, "optimizer": {"learningRate": arguments.learning_rate}},
        checkpoints={
            "path": str(folder / "checkpoints"),
            "every": arguments.iterations // arguments.points,
            "keep": 2 * arguments.points,
        },
    )
    write_policy(folder / "reference", scenario.layers, length=DIRECTION)
    (folder / "reward.py").write_text(REWARD)
    return manifest


def run_way(scenario: Scenario, way: TailHandling, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one job; return its figures, and the points of its reward against time."""
    assert scenario.pace is not None
    pace = replace(scenario.pace, training=arguments.training)
    with tempfile.TemporaryDirectory(prefix="rlhf-oversampling-") as temporary:
        folder = Path(temporary)
        manifest = write_job(folder, scenario, way, seed, arguments)
        lines = read_metrics(pinned_job.run_job(manifest, ["generation"] * scenario.workers, pace=pace)
                             / "metrics.jsonl")  # fmt: skip
        versions = {int(path.name.rpartition("-")[2]): path / "actor" for path in folder.glob("checkpoints/*-*")}
        points = [{"version": 0, "seconds": 0.0, **judged(folder / "policy")}]
        for version, actor in sorted(versions.items()):
            spent = sum(line["seconds/iteration"] for line in lines[WARM_UP:version])
            points.append({"version": version, "seconds": round(spent, 2), **judged(actor)})
    counted = lines[WARM_UP:]
    seconds = [line["seconds/iteration"] for line in counted]
    return {
        "samples_per_second": scenario.batch * len(counted) / sum(seconds),
        "tokens_per_second": sum(line["tokens"] for line in counted) / sum(seconds),
        **{
            name: statistics.median(line[metric] for line in counted)
            for name, metric in (
                ("iteration", "seconds/iteration"), ("generation_and_inference", "seconds/generation_and_inference"),
                ("training", "seconds/training"), ("tokens", "tokens"), ("tokens_cut", "tokens_cut"),
                ("response_tokens", "response_tokens_mean"), ("batch_reward", "reward"),
            )
        },
        **{
            name: statistics.mean(line.get(metric, 0.0) for line in counted)
            for name, metric in (
                ("tokens_carried", "tokens_carried"), ("restarted", "samples/restarted"),
                ("staleness", "staleness/mean"), ("overlap", "rollout/overlap_seconds"),
                ("clipped", "training/actor/clip_fraction"),
            )
        },
        "points": points,
    }  # fmt: skip


def judged(folder: Path) -> dict[str, float]:
    """Return what a policy folder's responses are expected to be, by its own probabilities of what follows which token:
    mean reward, of all and of those on the long path, the share of these, and mean tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    after = torch.arange(model.config.vocab_size)[:, None]
    with torch.no_grad():
        start = model(prompt).logits[0, -1].double().softmax(dim=-1)
        follows = model(torch.cat([prompt.expand(len(after), -1), after], dim=1)).logits[:, -1].double().softmax(dim=-1)
    wanted, long = (torch.tensor(tokenizer.convert_tokens_to_ids(list(text))) for text in (WANTED, LONG))
    share = float(start[long].sum())
    on_path = torch.zeros_like(start).index_copy(0, long, start[long] / share)
    reward, tokens = _expected(start, follows, wanted, tokenizer.eos_token_id)
    return {
        "reward": round(reward, 4),
        "reward_long": round(_expected(on_path, follows, wanted, tokenizer.eos_token_id)[0], 4),
        "long_share": round(share, 4),
        "tokens": round(tokens, 1),
    }


def _expected(start: torch.Tensor, follows: torch.Tensor, wanted: torch.Tensor, eos: int) -> tuple[float, float]:
    """(reward, tokens) of a chain that begins as `start` [V], with `follows` [last, next]."""
    probabilities, reward, tokens = start.clone(), 0.0, 0.0
    for place in range(MAX_TOKENS):
        tokens += float(probabilities.sum())
        probabilities[eos] = 0.0
        if place < FIRST:
            reward += float(probabilities[wanted].sum()) + NOT_THERE * (1 - float(probabilities.sum()))
        probabilities = probabilities @ follows
    return reward / FIRST, tokens


def seconds_to(goal: float, points: Sequence[dict[str, float]]) -> float | None:
    """Return when the reward reached a goal, on straight lines between points; None: it never did."""
    for before, after in pairwise(points):
        if after["reward"] >= goal:
            share = (goal - before["reward"]) / (after["reward"] - before["reward"])
            return round(before["seconds"] + max(0.0, share) * (after["seconds"] - before["seconds"]), 1)
    return None


def report(rounds: Sequence[dict[str, dict[str, Any]]], goal: float) -> dict[str, Any]:
    """Return the row of every way: medians over rounds, and how many times as fast as the first one in the same
    round."""
    table: dict[str, Any] = {}
    names = [name for name in WAYS if name in rounds[0]]
    for name in names:
        own = [one[name] for one in rounds]
        times = [one[name]["samples_per_second"] / one[names[0]]["samples_per_second"] for one in rounds]
        reached = [seconds_to(goal, one["points"]) for one in own]
        last = [one["points"][-1] for one in own]
        table[name] = {
            **{
                key: round(statistics.median(one[key] for one in own), 3)
                for key in own[0]
                if key != "points"
            },
            "times_as_fast": [round(value, 3) for value in times],
            "seconds_to_goal": reached,
            "last": {key: round(statistics.median(one[key] for one in last), 4) for key in last[0]},
            "points": [one["points"] for one in own],
        }  # fmt: skip
    return table


def main() -> int:
    """Prints a table, and with --json one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--iterations", type=int, default=10, help=f"of a job, as many as --points or more, {WARM_UP} not counted"
    )
    parser.add_argument("--points", type=int, default=5, help="checkpoints of a job, whose reward is computed")
    parser.add_argument("--training", type=float, default=0.0, help="seconds of a mini-batch; 0: what it takes")
    parser.add_argument("--share", type=float, default=1 / 3, help="prompts begun beyond those of the batch, of it")
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--goal", type=float, default=0.38, help="reward whose time is reported; 0.3 at first")
    parser.add_argument(
        "--scenario", choices=sorted(name for name in SCENARIOS if SCENARIOS[name].pace), default="paced-A"
    )
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(USUAL))
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    if arguments.iterations < (least := max(arguments.points, WARM_UP + 1)):
        parser.error(f"--iterations is {arguments.iterations}, must be at least {least}")
    scenario, names, rounds = SCENARIOS[arguments.scenario], arguments.ways, []
    for number in range(arguments.rounds):
        place = number % len(names)
        found = {}
        for name in (*names[place:], *names[:place]):
            found[name] = run_way(scenario, WAYS[name], 11 + number, arguments)
            print(f"round {number + 1}, {name}: {found[name]}", flush=True)
        rounds.append(found)
    table = report(rounds, arguments.goal)
    for name, row in table.items():
        print(f"{name:>13}: " + ", ".join(f"{key} {value}" for key, value in row.items() if key != "points"))
    settings = {key: value for key, value in vars(arguments).items() if key != "json"}
    if arguments.json:
        print(json.dumps({**settings, "load": os.getloadavg()[2], "ways": table}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
