"""Compares ways to treat a long tail: none, fusion, oversampling, long rounds with the same random keys, and windows.

`python benchmarks/oversampling.py [--ways none long-rounds] [--periods 2] [--json]` runs one whole job for each way,
one after the other, on real workers of a fixed speed (`paced_worker`). Jobs differ in `rollout.oversample`,
`rollout.cutBy`, `rollout.longRounds` and `fusion.interStage`. The way `long-rounds-auto` chooses its surplus prompts.
The policy is that of `long_tail_policy`: one response in fifteen is twenty times as long. The learning rate changes no
token, so a random key always gives the same response.
With `--by-prompt` one prompt in twelve has most of the long responses, so earlier epochs predict lengths. The file then
has the prompts of one period, which is also the window of the ways `window` and `window-fusion`.

Reported for each way, without the first period: samples and tokens per second that were trained on; the mean length of
trained responses over that of begun ones; the share of tokens that were decoded in vain; and the median seconds of
short and long rounds. The length of a response that oversampling cut off is that of the same random key in the job with
long rounds, so only the iterations that begin the same samples there are compared.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import pinned_job
from benchmarks.long_tail_job import MAX_TOKENS, ROWS, SCENARIOS
from benchmarks.long_tail_policy import unequal_prompts, write_policy

from rlhf_api.algorithms.iteration_prompts import PromptSchedule
from rlhf_coordinator.reports.trackers.metrics_jsonl import read_metrics
from rlhf_coordinator.state.carried_sample import origin_in
from rlhf_coordinator.state.sample import ITEM_BYTES, Origin
from rlhf_coordinator.storage.batch import finished_responses
from rlhf_coordinator.storage.journal import Journal
from rlhf_coordinator.storage.sample_codec import carried_samples

GROUP: Final = 4
"""Responses to a prompt; about one group in four has a long one."""
SCENARIO: Final = SCENARIOS["paced-A"]


@dataclass(frozen=True)
class TailTreatment:
    """Settings of a job for its long tail."""

    fusion: bool = False
    oversample: bool = False
    long_rounds: bool = False
    chosen: bool = False
    """Whether the job chooses its long rounds (`longRounds: Auto`)."""
    window: bool = False
    """Whether the job sorts the prompts of a period by expected length."""


WAYS: Final = {
    "none": TailTreatment(),
    "fusion": TailTreatment(fusion=True),
    "oversample": TailTreatment(oversample=True),
    "long-rounds": TailTreatment(oversample=True, long_rounds=True),
    "long-rounds-fusion": TailTreatment(fusion=True, oversample=True, long_rounds=True),
    "long-rounds-auto": TailTreatment(fusion=True, chosen=True),
    "window": TailTreatment(window=True),
    "window-fusion": TailTreatment(fusion=True, window=True),
}
USUAL: Final = ("none", "fusion", "oversample", "long-rounds")
"""Ways that run unless others are named."""


@dataclass(frozen=True)
class Responses:
    """The responses of one job, by origin."""

    trained: Mapping[Origin, int]
    """Origin of a trained response -> its tokens."""
    begun: frozenset[Origin]
    """Origins of all samples that were begun."""


def write_job(folder: Path, treatment: TailTreatment, arguments: argparse.Namespace, iterations: int) -> Path:
    """Write models, prompts, reward and the resolved manifest; return the manifest's path."""
    write_policy(folder / "policy", SCENARIO.layers)
    batch = arguments.prompts * GROUP
    period = PromptSchedule(arguments.prompts, arguments.oversample, "Deferred").period
    return pinned_job.write_job(
        folder,
        "oversampling",
        iterations=iterations,
        batch=batch,
        max_tokens=MAX_TOKENS,
        reference=SCENARIO.scorer,
        prompts=unequal_prompts(period * arguments.prompts) if arguments.by_prompt else (),
        length_window=period if treatment.window else 0,
        algorithm={"grpo": {"miniBatchSize": batch, "groupSize": GROUP, "lossAggregation": "SequenceMean"}},
        rollout={
            "batchSize": batch,
            "oversample": arguments.oversample if treatment.oversample else 0,
            "cutBy": arguments.cut_by if treatment.oversample or treatment.chosen else "Clock",
            "longRounds": "Enabled" if treatment.long_rounds else "Auto" if treatment.chosen else "Disabled",
            "maxPromptTokens": 8,
            "maxResponseTokens": MAX_TOKENS,
        },
        generation={"replicas": SCENARIO.workers, "maxBatchSize": ROWS, "speculation": {"mode": "Disabled"}},
        inference={"replicas": 0, "incremental": "Disabled"},
        fusion={"interStage": {"mode": "Auto" if treatment.fusion else "Disabled", "balance": "Disabled"}},
    )


def read_responses(run_dir: Path, first: int) -> Responses:
    """Return the responses of the iterations from `first` on, from the journal of a run."""
    journal, trained, begun = Journal(run_dir / "journal"), dict[Origin, int](), set[Origin]()
    for iteration in journal.iterations():
        if iteration < first:
            continue
        records = journal.read(iteration)
        carried = carried_samples(records)
        cut = {group for record in records for group in record.cut.groups}
        lengths = {m.key.sample: len(m.tokens.data) // ITEM_BYTES for m in finished_responses(records)}
        samples = {*lengths, *(group * GROUP + place for group in cut for place in range(GROUP))}
        begun |= {origin_in(carried, iteration, index) for index in samples}
        for index, length in lengths.items():
            if index // GROUP not in cut:
                trained[origin_in(carried, iteration, index)] = length
    return Responses(trained, frozenset(begun))


def trained_over_begun(own: Responses, lengths: Mapping[Origin, int]) -> float | None:
    """Return the mean length of trained responses over that of begun ones; None if lengths of begun ones are unknown.

    `lengths`: origin -> tokens of whole responses. Iterations with a begun response of unknown length do not count.
    """
    unknown = {origin.iteration for origin in own.begun if origin not in lengths}
    begun = [lengths[origin] for origin in own.begun if origin.iteration not in unknown]
    trained = [length for origin, length in own.trained.items() if origin.iteration not in unknown]
    return statistics.fmean(trained) / statistics.fmean(begun) if trained and begun else None


def figures(lines: Sequence[Mapping[str, float]], batch: int) -> dict[str, float]:
    """Return rates and seconds of the counted iterations of a job. `batch`: samples of a batch."""
    seconds = [line["seconds/iteration"] for line in lines]
    tokens, vain = (sum(line[name] for line in lines) for name in ("tokens", "tokens_cut"))
    kinds = {
        f"{kind}_seconds": [line["seconds/iteration"] for line in lines if line.get("rollout/long_round", 0.0) == value]
        for kind, value in (("short", 0.0), ("long", 1.0))
    }
    return {
        "samples_per_second": batch * len(lines) / sum(seconds),
        "tokens_per_second": tokens / sum(seconds),
        "share_in_vain": vain / (tokens + vain),
        **{name: statistics.median(values) for name, values in kinds.items() if values},
    }


def main() -> int:
    """Print a table, and with --json one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(USUAL))
    parser.add_argument("--prompts", type=int, default=24, help="prompts of a batch")
    parser.add_argument("--oversample", type=int, default=8, help="prompts begun beyond those of the batch")
    parser.add_argument("--cut-by", choices=("Clock", "Counts"), default="Counts")
    parser.add_argument("--by-prompt", action="store_true", help="let prompts determine most of the lengths")
    parser.add_argument("--periods", type=int, default=2, help="periods of rounds that count, after a first one")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    schedule = PromptSchedule(arguments.prompts, arguments.oversample, "Deferred")
    period = schedule.period
    iterations, found, responses = period * (1 + arguments.periods), dict[str, Any](), dict[str, Responses]()
    for name in arguments.ways:
        with tempfile.TemporaryDirectory(prefix="rlhf-oversampling-") as temporary:
            manifest = write_job(Path(temporary), WAYS[name], arguments, iterations)
            run_dir = pinned_job.run_job(manifest, ["generation"] * SCENARIO.workers, pace=SCENARIO.pace)
            found[name] = figures(read_metrics(run_dir / "metrics.jsonl")[period:], arguments.prompts * GROUP)
            responses[name] = read_responses(run_dir, period)
        print(f"{name}: {found[name]}", flush=True)
    lengths = {origin: length for own in responses.values() for origin, length in own.trained.items()}
    first = found[arguments.ways[0]]["samples_per_second"]
    for name, row in found.items():
        row["trained_over_begun"] = trained_over_begun(responses[name], lengths)
        row["times_as_fast"] = row["samples_per_second"] / first
        print(f"{name:>18}: " + ", ".join(f"{key} {value:.3f}" for key, value in row.items() if value is not None))
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    if arguments.json:
        print(json.dumps({**settings, "iterations": iterations, "load": os.getloadavg()[2], "ways": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
