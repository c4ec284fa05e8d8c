"""Reallocation on and off, in turns in one job, on four generation workers of unequal speed.

`python benchmarks/unequal_workers.py [--rounds 5] [--speculation Auto] [--json]`. Real worker processes of a stated
speed (`paced_worker`), of which one takes SPEEDS times as long as the first for everything; every worker gets as many
samples, all at once, so nothing is queued and nothing but reallocation evens them out. Lengths are the policy's own,
with a long tail; its tokens repeat, so there is something to draft. Within a round both settings decode the same
responses, and the bytes of all tokens are compared. Reported: generated tokens a second of either, how many times as
fast generation is with reallocation (quartiles), and each set of samples that moved, with the seconds that its two
workers were predicted to be done earlier and those by which they were (`fusion.reallocation`). Fusion is off.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import pinned_job
from benchmarks.long_tail import WARM_UP, TailSetting, Turns
from benchmarks.long_tail_job import SMALL
from benchmarks.long_tail_policy import write_policy
from benchmarks.paced_worker import StepPace

from rlhf_coordinator.fusion import fusion_planning, learning, reallocation
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.loop import actions
from rlhf_coordinator.reports.trackers.metrics_jsonl import read_metrics
from rlhf_coordinator.scheduling import balancing, consolidation
from rlhf_coordinator.storage import prompts

SPEEDS = (1.0, 1.0, 2.0, 3.0)
"""How many times as long everything takes on each worker."""
BATCH, ROWS, MAX_TOKENS = 64, 24, 320
PACE = StepPace(0.016, 5e-4, 1e-7, 0.005, 2e-6)
"""Seconds: a step of one sample 16.5 ms, of 16 24 ms, with hardly any keys."""
REPEATED = 0.85
OFF, ON = TailSetting("off"), TailSetting("on")


class Recorder:
    """What each iteration did."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.moves: dict[int, list[dict[str, Any]]] = {}
        self.tokens: dict[int, list[bytes]] = {}

    def note(self, run: JobRun) -> None:
        """After all of an iteration is scored."""
        fusion, iteration = run.state.fusion, run.state.iteration
        self.tokens[iteration] = [bytes(sample.response.tokens) for sample in run.state.ledger.samples]
        lengths = [len(sample.response) for sample in run.state.ledger.samples]
        known = {one.made: one for one in reallocation.measured(fusion, lengths, run.state.incremental.finished)}
        self.moves[iteration] = [
            {
                "source": made.reallocation.moves[0].source,
                "destination": made.reallocation.moves[0].destination,
                "samples": len(made.reallocation.moves),
                "by_cache": sum(move.kv for move in made.reallocation.moves),
                "predicted_gain_seconds": round(made.reallocation.gain_seconds, 3),
                "measured_gain_seconds": round(known[made].measured_gain, 3) if made in known else None,
                "predicted_tokens_per_second": round(made.reallocation.after - made.reallocation.before, 1),
            }
            for made in fusion.reallocated
        ]


@contextmanager
def reallocation_in_turns(turns: Turns, recorder: Recorder) -> Iterator[None]:
    """Samples move in every other iteration; none fuses, and both of a round decode the same responses."""
    begin, report, wanted, random_key = (
        fusion_planning.begin_iteration, reallocation.report, balancing.reallocations, prompts.random_key
    )  # fmt: skip
    learned = learning.learn

    def begin_unfused(run: JobRun) -> None:
        run.state.fusion.begin_iteration()
        run.state.fusion.planning = None

    def learn(run: JobRun) -> None:
        before = run.state.fusion.lengths
        learned(run)
        if not turns.ends(run.state.iteration):
            run.state.fusion.lengths = before  # no setting knows the responses that it is going to decode

    def reported(run: JobRun) -> dict[str, float]:
        recorder.note(run)
        return report(run)

    def moves(context: Any, state: Any, now: float, ready: Any) -> Any:
        return wanted(context, state, now, ready) if turns.turn(state.iteration)[1] is ON else ()

    fusion_planning.begin_iteration, learning.learn = begin_unfused, learn
    reallocation.report, consolidation.reallocations = reported, moves  # type: ignore[attr-defined]
    actions.random_key = lambda seed, iteration, sample: random_key(seed, turns.turn(iteration)[0], sample)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        fusion_planning.begin_iteration, learning.learn = begin, learned
        reallocation.report, consolidation.reallocations = report, wanted  # type: ignore[attr-defined]
        actions.random_key = random_key  # type: ignore[attr-defined]


def run(folder: Path, turns: Turns, recorder: Recorder, speculation: str) -> Path:
    """Runs the job; its run folder."""
    write_policy(folder / "policy", layers=2, repeated=REPEATED)
    manifest = pinned_job.write_job(
        folder,
        "unequal-workers",
        iterations=turns.iterations,
        batch=BATCH,
        max_tokens=MAX_TOKENS,
        reference=SMALL,
        generation={"replicas": len(SPEEDS), "maxBatchSize": ROWS, "speculation": {"mode": speculation}},
        inference={"replicas": 0, "incremental": "Disabled"},
        fusion={"interStage": {"mode": "Auto", "balance": "Auto"}},
    )
    paces = [PACE.slower(times) for times in SPEEDS]
    with reallocation_in_turns(turns, recorder):
        return pinned_job.run_job(manifest, ["generation"] * len(SPEEDS), pace=paces)


def report(run_dir: Path, turns: Turns, recorder: Recorder) -> dict[str, Any]:
    """Numbers of both settings, and the moves."""
    by_round: dict[int, dict[str, dict[str, Any]]] = {}
    for line in read_metrics(run_dir / "metrics.jsonl")[WARM_UP:]:
        iteration = int(line["iteration"])
        number, setting = turns.turn(iteration)
        seconds = line["seconds/generation"]
        by_round.setdefault(number, {})[setting.name] = {
            "iteration": iteration, "seconds": seconds, "tokens_per_second": line["tokens"] / seconds,
        }  # fmt: skip
    whole = [both for both in by_round.values() if len(both) == 2]
    same = all(recorder.tokens[both["on"]["iteration"]] == recorder.tokens[both["off"]["iteration"]] for both in whole)
    ratios = [both["off"]["seconds"] / both["on"]["seconds"] for both in whole]
    moves = [move for both in whole for move in recorder.moves[both["on"]["iteration"]]]
    both_known = [move for move in moves if move["measured_gain_seconds"] is not None]
    return {
        "rounds": len(whole),
        "same_tokens": same,
        "tokens_per_second": {
            name: round(statistics.median(both[name]["tokens_per_second"] for both in whole), 1)
            for name in ("off", "on")
        },
        "seconds": {
            name: round(statistics.median(both[name]["seconds"] for both in whole), 3) for name in ("off", "on")
        },
        "off_over_on": [round(value, 3) for value in statistics.quantiles(ratios, n=4, method="inclusive")],
        "samples_moved": sum(move["samples"] for move in moves),
        "measured_moves": len(both_known),
        "predicted_gain_seconds": round(sum(move["predicted_gain_seconds"] for move in both_known), 3),
        "measured_gain_seconds": round(sum(move["measured_gain_seconds"] for move in both_known), 3),
        "moves": moves,
    }


def _medians(rounds: list[dict[str, dict[str, Any]]], value: str) -> dict[str, float]:
    return {name: round(statistics.median(both[name][value] for both in rounds), 3) for name in ("off", "on")}


def main() -> int:
    """Prints a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--speculation", choices=("Disabled", "Auto", "Fixed"), default="Auto")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    turns = replace(Turns.of((), arguments.rounds), settings=(OFF, ON))
    recorder = Recorder(turns)
    with tempfile.TemporaryDirectory(prefix="rlhf-unequal-") as folder:
        run_dir = run(Path(folder), turns, recorder, arguments.speculation)
        result = report(run_dir, turns, recorder)
    result |= {"speculation": arguments.speculation, "speeds": SPEEDS, "load": os.getloadavg()[2]}
    for move in result["moves"]:
        print(move)
    print({name: value for name, value in result.items() if name != "moves"}, flush=True)
    if arguments.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
