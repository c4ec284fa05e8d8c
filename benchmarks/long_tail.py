"""Measures generation and inference with a long tail: no fusion, Auto, and fixed thresholds, in turns in one job.

`python benchmarks/long_tail.py [--rounds 5] [--scenario A B C] [--pictures FOLDER] [--json]`; `--join` combines runs.

Generation workers are real processes pinned to a core and do all scoring too (inference.replicas: 0). The policy is a
Llama that computes attention and MLP, but whose next token depends only on the last token. So its own end-of-sequence
decisions determine the lengths: one response in fifteen takes a path on which it is twenty times as long. Within a
round every setting decodes the same responses.

In A scoring takes both workers as long as the tail; in B it takes next to no time; in C half of A, as long as the tail
for the one released worker. With two workers fusion cannot save more than half of the tail: the gain is at most 1.33
times in A and 1.5 in C, minus the effect of the time before the tail.

A, B and C run as fast as their cores, with one worker per core. paced-A, -B, -C are like them with smaller models and
workers of a fixed speed (`paced_worker`). paced-D has four workers and twice the samples; scoring takes all four as
long as the tail.

Reported for each setting: median seconds of generation + inference; the speed-up over Disabled in the same round
(quartiles); the simulator's error on the same lengths (in total, for the time of generation, and for the work of
decoding and scoring); and the share of control and transfer.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.long_tail_job import SCENARIOS, write_job
from benchmarks.pinned_job import run_job

from rlhf_coordinator.fusion import fusion_planning, learning
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.loop import actions
from rlhf_coordinator.reports.run_figures import draw_timeline
from rlhf_coordinator.reports.trackers.metrics_jsonl import read_metrics
from rlhf_coordinator.reports.trackers.timeline_json import read_spans
from rlhf_coordinator.service.server import order_stop
from rlhf_coordinator.storage import prompts
from rlhf_planner.inter_stage.choose import FusionChoice

SHARES = (1 / 12, 1 / 6, 1 / 3)
"""Thresholds of the sweep, as shares of the batch; with four workers the pool is one or two of them."""
MEASURED = {
    "seconds": "seconds/generation_and_inference", "generation": "seconds/generation", "inference": "seconds/inference",
    "simulated": "fusion/simulated_seconds",
    "predicted": "fusion/predicted_seconds", "simulated_generation": "fusion/simulated_generation_seconds",
    "threshold": "fusion/threshold", "moved": "samples/migrated", "moved_kv": "fusion/moved_kv",
    "overhead": "fusion/overhead_share", "control": "control_share", "idle": "idle/generation",
    "decode_ratio": "fusion/decode_ratio", "score_ratio": "fusion/score_ratio",
    "transfer_ratio": "fusion/transfer_ratio", "contention_ratio": "fusion/contention_ratio",
    "decode_busy": "fusion/decode_busy", "simulated_decode_busy": "fusion/simulated_decode_busy",
    "score_busy": "fusion/score_busy", "simulated_score_busy": "fusion/simulated_score_busy",
}  # fmt: skip
"""Name in the output -> metric of an iteration."""
WARM_UP = 3
"""Iterations that do not count: the first measures costs, caches fill, lengths are learned."""
WARM_UP_ROUNDS = 1_000_000
"""Offset of warm-up rounds, so that no other round has their responses."""


@dataclass(frozen=True)
class TailSetting:
    """Treatment of the tail in an iteration."""

    name: str
    threshold: int = 0
    pool: int = 0
    auto: bool = False


@dataclass(frozen=True)
class Turns:
    """Assignment of iterations to settings."""

    settings: tuple[TailSetting, ...]
    rounds: int
    first: int = 0
    """Number of the first round."""

    @classmethod
    def from_plans(
        cls, plans: Iterable[tuple[int, int]], rounds: int, first: int = 0, *, twice: bool = False
    ) -> "Turns":
        """Return the turns of no fusion, Auto, and the sweep of (threshold, pool); `twice` runs no fusion once more."""
        sweep = (TailSetting(f"R_t={threshold}, m={pool}", threshold, pool) for threshold, pool in plans)
        again = (TailSetting("Disabled again"),) if twice else ()
        return cls((TailSetting("Disabled"), TailSetting("Auto", auto=True), *sweep, *again), rounds, first)

    @property
    def iterations(self) -> int:
        """Number of iterations of the job."""
        return WARM_UP + self.rounds * len(self.settings)

    def turn(self, iteration: int) -> tuple[int, TailSetting]:
        """Return (round, setting) of an iteration; every round begins with another setting."""
        if iteration < WARM_UP:
            return WARM_UP_ROUNDS + iteration, self.settings[0]
        number, place = divmod(iteration - WARM_UP, len(self.settings))
        return self.first + number, self.settings[(place + number) % len(self.settings)]

    def ends(self, iteration: int) -> bool:
        """Return whether the iteration's responses do not occur again."""
        return iteration < WARM_UP or (iteration - WARM_UP + 1) % len(self.settings) == 0


@contextmanager
def in_turns(turns: Turns, seconds: float) -> Iterator[None]:
    """Apply the settings in turns to every iteration of the coordinator in this process.

    No round starts later than `seconds` from now. Lengths are learned after each round, so no setting knows the
    responses that it is going to decode.
    """
    planned, learned, random_key = fusion_planning.begin_iteration, learning.learn, prompts.random_key
    deadline = time.monotonic() + seconds

    def begin(run: JobRun) -> None:
        number, setting = turns.turn(run.state.iteration)
        if time.monotonic() > deadline and turns.turn(run.state.iteration - 1)[0] != number:
            order_stop(run, checkpoint=False, reason="its time is over")
        if setting.auto:
            planned(run)
            return
        run.state.fusion.begin_iteration()
        run.state.fusion.planning = None  # a plan that is made late does not belong to this setting
        if setting.threshold:
            run.state.fusion.choice = FusionChoice(setting.threshold, setting.pool, "Auto", 0.0, 0.0, (), setting.name)

    def learn(run: JobRun) -> None:
        before = run.state.fusion.lengths
        learned(run)
        if not turns.ends(run.state.iteration):
            run.state.fusion.lengths = before

    fusion_planning.begin_iteration, learning.learn = begin, learn
    actions.random_key = lambda seed, iteration, sample: random_key(seed, turns.turn(iteration)[0], sample)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        fusion_planning.begin_iteration, learning.learn = planned, learned
        actions.random_key = random_key  # type: ignore[attr-defined]


def run_scenario(folder: Path, scenario: str, turns: Turns, seconds: float) -> Path:
    """Run the job; return its run folder."""
    settings = SCENARIOS[scenario]
    manifest = write_job(folder, settings, turns.iterations)
    with in_turns(turns, seconds):
        return run_job(manifest, ["generation"] * settings.workers, pace=settings.pace)


def points(run_dir: Path, turns: Turns) -> list[dict[str, Any]]:
    """Return the measurements, one entry per counted iteration."""
    answer = []
    for line in read_metrics(run_dir / "metrics.jsonl")[WARM_UP:]:
        number, setting = turns.turn(int(line["iteration"]))
        values = {name: line.get(key) for name, key in MEASURED.items()}
        answer.append({"round": number, "setting": setting.name} | values)
    return answer


def report(rounds_reported: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a scenario, from `points` of one or more runs."""
    by_round: dict[str, dict[int, dict[str, Any]]] = {}
    for point in rounds_reported:
        by_round.setdefault(point["setting"], {})[point["round"]] = point
    table = {name: _row(own, by_round["Disabled"]) for name, own in by_round.items()}
    sweep = [name for name in table if name.startswith("R_t")]
    best = max(sweep, key=lambda name: table[name]["off_over_this"][1])
    errors = [abs(error) for row in table.values() for error in row["simulator_errors"]]
    auto = by_round["Auto"]
    return {
        "rounds": len(auto),
        "settings": table,
        "best_of_sweep": best,
        "best_over_auto": _quartiles([by_round[best][n]["seconds"] / auto[n]["seconds"] for n in sorted(auto)]),
        "simulator_error": _quartiles(errors),
        "chosen": [int(auto[number]["threshold"]) for number in sorted(auto)],
    }


def _row(own: dict[int, dict[str, Any]], off: dict[int, dict[str, Any]]) -> dict[str, Any]:
    points = [own[number] for number in sorted(own)]
    errors = [point["simulated"] / point["seconds"] - 1 for point in points if point["simulated"] is not None]
    median = {
        name: round(statistics.median(point[name] for point in points), 5)
        for name in ("seconds", "generation", "inference", "overhead", "idle", "moved")
    }
    return median | {
        "off_over_this": _quartiles([off[number]["seconds"] / own[number]["seconds"] for number in sorted(own)]),
        "simulated_over_measured": {
            part: round(statistics.median(point[f"simulated_{part}"] / point[part] for point in points), 3)
            for part in ("generation", "decode_busy", "score_busy")
            if all(point[f"simulated_{part}"] is not None for point in points)
        },
        "simulator_errors": [round(error, 3) for error in errors],
        "simulator_error": round(statistics.median(map(abs, errors)), 4) if errors else None,
    }


def _quartiles(values: Sequence[float]) -> list[float]:
    """Return [first quartile, median, third quartile]."""
    if len(values) < 2:
        return [round(value, 4) for value in values for _ in range(3)]
    return [round(value, 4) for value in statistics.quantiles(values, n=4, method="inclusive")]


def _say(scenario: str, result: dict[str, Any]) -> None:
    for name, row in result["settings"].items():
        low, median, high = row["off_over_this"]
        print(
            f"{scenario} {name:>12}: {row['seconds']:6.2f} s (generation {row['generation']:.2f}), {median:.3f} times "
            f"as fast as Disabled (quartiles {low:.3f} to {high:.3f}), simulator off by {row['simulator_error']:.1%}, "
            f"({row['simulated_over_measured']}), overhead {row['overhead']:.2%}, idle {row['idle']:.0%}, moved "
            f"{row['moved']:.0f}",
            flush=True,
        )
    low, median, high = result["best_over_auto"]
    print(
        f"{scenario} Auto against {result['best_of_sweep']}, the best: {median:.3f} times as fast (quartiles {low:.3f} "
        f"to {high:.3f}, {result['rounds']} rounds); it chose {result['chosen']}",
        flush=True,
    )


def _lengths(run_dir: Path) -> list[int]:
    from rlhf_coordinator.storage.journal import Journal

    journal = Journal(run_dir / "journal")
    records = [record for number in journal.iterations() for record in journal.read(number)]
    return [len(r.finished.tokens.data) // 4 for r in records if r.WhichOneof("record") == "finished"]


def draw(run_dir: Path, folder: Path, scenario: str, turns: Turns) -> None:
    """Draw the timeline of one iteration without fusion and of the one with Auto in the same round."""
    spans = [span for span in read_spans(run_dir / "timeline.json") if not span.name.startswith("predicted/")]
    shown = ("decode", "prefill", "score", "migrate")
    last = max(span.iteration for span in spans)
    for iteration in range(max(WARM_UP, last + 1 - len(turns.settings)), last + 1):
        name = turns.turn(iteration)[1].name
        if name in ("Disabled", "Auto"):
            mine = [span for span in spans if span.iteration == iteration and span.name.startswith(shown)]
            draw_timeline(mine, folder / f"long-tail-{scenario}-{name.lower()}.png")


def main() -> int:
    """Print a line per setting, then all results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=math.inf, help="of a scenario; no round begins later")
    parser.add_argument(
        "--twice", action="store_true", help="Disabled twice: it shows how far equal settings lie apart"
    )
    parser.add_argument("--first-round", type=int, default=0, help="other rounds have other responses")
    parser.add_argument("--thresholds", nargs="+", type=int, help="of the sweep; else a twelfth, a sixth, a third")
    parser.add_argument("--pools", nargs="+", type=int, default=(1, 2), help="of the sweep, where there are as many")
    parser.add_argument("--scenario", nargs="+", choices=sorted(SCENARIOS), default=["A", "B", "C"])
    parser.add_argument("--pictures", type=Path, help="folder for the timelines of the last round")
    parser.add_argument("--join", nargs="+", type=Path, help="report the runs whose --json line these files end with")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"load": os.getloadavg()[2]}
    reported: dict[str, list[dict[str, Any]]] = {}
    for file in arguments.join or ():
        for scenario, points in json.loads(file.read_text().splitlines()[-1])["points"].items():
            reported.setdefault(scenario, []).extend(points)
    for scenario in () if arguments.join else arguments.scenario:
        settings = SCENARIOS[scenario]
        thresholds = arguments.thresholds or [round(share * settings.batch) for share in SHARES]
        plans = itertools.product(thresholds, sorted(set(arguments.pools) & set(settings.pools)))
        turns = Turns.from_plans(plans, arguments.rounds, arguments.first_round, twice=arguments.twice)
        with tempfile.TemporaryDirectory(prefix="rlhf-long-tail-") as folder:
            run_dir = run_scenario(Path(folder), scenario, turns, arguments.seconds)
            reported[scenario], lengths = points(run_dir, turns), sorted(_lengths(run_dir))
            results |= {"length_median": statistics.median(lengths), "length_p99": lengths[int(0.99 * len(lengths))]}
            if arguments.pictures:
                draw(run_dir, arguments.pictures, scenario, turns)
    for scenario in sorted(reported):
        results[scenario] = report(reported[scenario])
        _say(scenario, results[scenario])
    print(json.dumps(results | {"points": reported}) if arguments.json else results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
