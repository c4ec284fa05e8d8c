"""Whether whole jobs end with the same weights and rewards whoever drafts, how far, and whatever fails meanwhile.

`python benchmarks/compare_drafting.py [--json]` runs one deterministic job on the torch engine (two generation workers,
samples migrate with their caches, actor and critic train fused) without drafts, then with every fixed length, each
drafter alone, Auto, and with a generation worker and the coordinator killed while they draft; and a job by vLLM in
float32 without drafts, with a fixed length and with Auto. Prints what each ended with, beside how much it drafted.
By vLLM the responses of the first iteration are compared: the last bits of its log-probabilities depend on what it
batches, so what is trained differs from run to run with or without drafts.
Exit code 1: a job differs from the one without drafts, or one that was to draft did not.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.chaos import Kills, run_job
from tests.support.local_job import write_job

from rlhf_coordinator.reports.sample_table import FILE, FOLDER
from rlhf_coordinator.reports.trackers.metrics_jsonl import read_metrics

FIXED: Final = range(1, 9)
"""Drafted tokens a sample."""
FUSION: Final = {
    "fusion.interStage.mode": "Fixed",
    "fusion.interStage.threshold": 10,
    "fusion.interStage.pool": 1,
    "fusion.interStage.transfer": "KV",
    "fusion.intraStage.mode": "FusedSplit",
}
TEMPERATURE: Final = 0.2
"""The policy has random weights: at 1.0 its text repeats nothing, and every draft is wrong."""
SAME_BITS: Final = ("torch",)
"""Engines whose deterministic jobs end with the same bits every time."""
DRAFTERS: Final = ("Siblings", "Ngram", "Model")


@dataclass(frozen=True)
class Job:
    """One run, and what it is compared with."""

    name: str
    engine: str
    drafting: dict[str, Any]
    kills: Kills | None = None


@dataclass(frozen=True)
class Outcome:
    """What a run ended with."""

    name: str
    engine: str
    code: int
    weights: str
    """SHA-256 over the files of the last checkpoint's actor."""
    rewards: str
    """SHA-256 over reward and KL of every iteration."""
    responses: str
    """SHA-256 over the texts and lengths of the first iteration's responses."""
    drafted: int
    accepted: int
    moved: int
    killed: int
    seconds: float


def jobs(policy: Path) -> Iterator[Job]:
    """Yield every run, per engine the one without drafts first."""
    model = {"draftModel.path": str(policy)}
    yield Job("none", "torch", {"mode": "Disabled"})
    for length in FIXED:
        yield Job(f"fixed {length}", "torch", {"mode": "Fixed", "maxTokens": length})
    for drafter in DRAFTERS:
        needs = model if drafter == "Model" else {}
        yield Job(f"{drafter} alone", "torch", {"mode": "Fixed", "maxTokens": 4, "drafters": [drafter], **needs})
    every = {"mode": "Auto", "drafters": list(DRAFTERS), **model}
    yield Job("Auto, all drafters", "torch", every)
    for victim in ("generation-1", "coordinator"):
        kills = Kills(seed=1, count=2, among=(victim,), iterations_between=1, longest_calm_seconds=1.0)
        yield Job(f"{victim} killed", "torch", {"mode": "Fixed", "maxTokens": 4}, kills)
    yield Job("none", "vllm", {"mode": "Disabled"})
    yield Job("fixed 4", "vllm", {"mode": "Fixed", "maxTokens": 4})
    yield Job("Auto", "vllm", {"mode": "Auto"})


def run(job: Job, manifest: Path, folder: Path) -> Outcome:
    """Return what a run ended with."""
    settings = {"rollout.temperature": TEMPERATURE} | {
        f"generation.speculation.{field}": value for field, value in job.drafting.items()
    }
    if job.engine == "torch":
        settings |= FUSION
    options = [word for field, value in settings.items() for word in ("--set", f"spec.{field}={json.dumps(value)}")]
    ended = run_job(manifest, folder, options=options, kills=job.kills)
    lines = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").is_file() else []
    shown = [(line.get("reward"), line.get("training/actor/kl")) for line in lines]

    def total(metric: str) -> int:
        return round(sum(line.get(metric) or 0 for line in lines))

    table = folder / FOLDER / FILE.format(0)
    rows = [json.loads(line) for line in table.read_text().splitlines()] if table.is_file() else []
    texts = [(row["response"], row["response_tokens"]) for row in rows]
    return Outcome(
        name=job.name,
        engine=job.engine,
        code=ended.code,
        weights=ended.weights,
        responses=hashlib.sha256(json.dumps(texts).encode()).hexdigest() if texts else "",
        rewards=hashlib.sha256(json.dumps(shown).encode()).hexdigest(),
        drafted=total("speculation/drafted"),
        accepted=total("speculation/accepted"),
        moved=total("samples/migrated"),
        killed=len(ended.kills),
        seconds=round(ended.seconds, 1),
    )


def problems(outcomes: list[Outcome]) -> list[str]:
    """Return what is not as it is to be."""
    none = {outcome.engine: outcome for outcome in outcomes if outcome.name == "none"}
    found = []
    for outcome in outcomes:
        base, who = none[outcome.engine], f"{outcome.engine}, {outcome.name}"
        if outcome.code:
            found.append(f"{who}: ended with {outcome.code}")
        elif outcome.responses != base.responses or not outcome.responses:
            found.append(f"{who}: other responses than without drafts")
        elif outcome.engine in SAME_BITS and (outcome.weights, outcome.rewards) != (base.weights, base.rewards):
            found.append(f"{who}: other weights or rewards than without drafts")
        if outcome is not base and not outcome.drafted and not outcome.name.startswith("Auto"):
            found.append(f"{who}: drafted nothing")
    return found


def main() -> int:
    """Exit code 1 when a job differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one object as the last line")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--engines", default="torch,vllm")
    arguments = parser.parse_args()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="rlhf-drafting-") as scratch:
        folder = Path(scratch)
        manifests = {
            engine: write_job(folder / engine, engine=engine, iterations=arguments.iterations, responses=96, every=1)
            for engine in arguments.engines.split(",")
        }
        for number, job in enumerate(jobs(folder / "torch" / "policy")):
            if job.engine in manifests:
                outcomes.append(run(job, manifests[job.engine], folder / f"run-{number}"))
                done = outcomes[-1]
                digests = f"weights {done.weights[:8]} rewards {done.rewards[:8]} responses {done.responses[:8]}"
                counts = f"drafted {done.drafted:6} accepted {done.accepted:5} moved {done.moved:4}"
                ending = f"killed {done.killed} {done.seconds:6.1f} s"
                print(f"{done.engine:6} {done.name:20} code {done.code} {digests} {counts} {ending}", flush=True)
    found = problems(outcomes)
    print("\n".join(found) or "no job differs from the one without drafts")
    if arguments.json:
        print(json.dumps({"outcomes": [asdict(outcome) for outcome in outcomes], "problems": found}))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
