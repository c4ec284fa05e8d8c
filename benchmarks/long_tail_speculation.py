"""A long-tailed iteration without anything, with speculation, with fusion, with both, and with the best fixed of each.

`python benchmarks/long_tail_speculation.py [--scenario paced-E] [--rounds 3] [--json]`. One job of `long_tail` for each
way to draft, one after the other, in which fusion takes its turns: none, Auto, fixed thresholds. Responses of a round
are the same in every setting, also between jobs, as no draft changes a token; the bytes of all tokens are compared. In
scenario paced-E 85% of tokens follow by rule, so that they can be drafted, workers are of a stated speed
(`paced_worker`), and scoring takes the one worker that is released as long as the tail; E is the same as fast as its
cores are. slow-E is paced-E with twice the time for everything: more of other work hides below it. No prompt comes
twice, as a setting would draft by heart what another said in the same round.
The tail is the time in which no more than a sixth of the samples is unfinished, without anything. Reported: median
seconds of generation and inference, how many times as fast as without anything (quartiles over rounds), which share of
the tail is won, and how far off three predictions are: `predicted`, made before the iteration, which knows no lengths
(of fusion that is chosen alone); `simulated`, by the lengths that came out and the costs that were known before; and
`by_own_costs`, by these lengths and what this very iteration's work took, which is the simulation's own error. Between
the last two lies a machine that changed, between the first two what cannot be known beforehand.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.long_tail import Turns, points, run_scenario
from benchmarks.long_tail_job import SCENARIOS

from rlhf_coordinator.fusion import learning
from rlhf_coordinator.job.job_run import JobRun
from rlhf_planner.inter_stage.simulate import simulate
from rlhf_planner.speculation.forecast import NO_SPECULATION
from rlhf_planner.speculation.observed_gain import observed_forecast

DRAFTS: dict[str, dict[str, Any]] = {
    "none": {"mode": "Disabled"},
    "Auto": {"mode": "Auto"},
    **{f"Fixed {tokens}": {"mode": "Fixed", "maxTokens": tokens} for tokens in (2, 4, 8)},
}
SHARES = (1 / 6, 1 / 3)
"""Thresholds that are tried as fixed ones, of the batch."""
TAIL = 1 / 6
"""Share of the samples that are unfinished in the tail."""


class WatchedTails:
    """Of each (way to draft, iteration): the tokens, and when samples were finished."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[bytes]] = {}
        self.tails: dict[tuple[str, int], float] = {}
        self.by_own_costs: dict[tuple[str, int], float] = {}
        """What the simulation makes of an iteration in hindsight, in seconds."""

    @contextmanager
    def watching(self, drafts: str) -> Iterator[None]:
        """Note what every iteration of the coordinator in this process came to."""
        learned = learning.learn

        def learn(run: JobRun) -> None:
            new = run.state.fusion.learned is None
            if new:
                state, place = run.state, (drafts, run.state.iteration)
                self.tokens[place] = [bytes(sample.response.tokens) for sample in state.ledger.samples]
                finished = sorted(state.incremental.finished.values())
                self.tails[place] = finished[-1] - finished[-1 - int(TAIL * len(finished))]
            learned(run)
            if new and run.state.fusion.measured:
                self.by_own_costs[drafts, run.state.iteration] = by_own_costs(run)

        learning.learn = learn
        try:
            yield
        finally:
            learning.learn = learned


def by_own_costs(run: JobRun) -> float:
    """Seconds of an iteration that was just learned from, by its own lengths and what its own work took."""
    state, fusion = run.state, run.state.fusion
    samples = state.ledger.samples
    prompts, lines = ([of[sample.index] for sample in samples] for of in (state.prompt_tokens, state.prompt_lines))
    newest = {kind: ratios[-1:] for kind, ratios in fusion.costs.ratios.items()}
    plain = replace(fusion.costs, steps=fusion.costs.steps[-1:], ratios=newest, speculation=NO_SPECULATION)
    forecast = observed_forecast(
        NO_SPECULATION,
        (stretch for _, stretch in fusion.stretches),
        lambda rows, context: plain.decode_seconds(max(1, round(rows)), context),
        zero_allowed=False,  # also where they were slower: it is what was done
    )
    setup, choice = learning.iteration_setup(run, prompts, lines), fusion.choice
    fused = run.scheduled.consolidation.planned
    return simulate(
        [len(sample.response) for sample in samples],
        setup,
        replace(plain, speculation=forecast),
        choice.threshold if fused else 0,
        choice.pool if fused else setup.generation_workers,
        choice.transfer,
        model=fusion.lengths,
    ).seconds


def measure(scenario: str, rounds: int, chosen: Sequence[str]) -> tuple[list[dict[str, Any]], bool]:
    """(an entry for each iteration that counts, whether all settings of a round drew the same tokens)."""
    what, seen, entries = SCENARIOS[scenario], WatchedTails(), []
    plans = [(round(share * what.batch), 1) for share in SHARES]
    tokens: dict[int, list[bytes]] = {}
    same = True
    for drafts, speculation in ((name, DRAFTS[name]) for name in chosen):
        turns = Turns.of(plans, rounds)
        with tempfile.TemporaryDirectory(prefix="rlhf-long-tail-") as folder, seen.watching(drafts):
            run_dir = run_scenario(Path(folder), scenario, turns, float("inf"), speculation)
            for at, point in enumerate(points(run_dir, turns)):
                iteration = at + turns.iterations - rounds * len(turns.settings)
                own = seen.tokens[drafts, iteration]
                same = same and tokens.setdefault(point["round"], own) == own
                entry = {"drafts": drafts, "fusion": point["setting"], "tail": seen.tails[drafts, iteration]}
                entries.append(entry | {"by_own_costs": seen.by_own_costs.get((drafts, iteration))} | point)
        print(f"{drafts}: {len(entries)} iterations measured", flush=True)
    return entries, same


def report(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Numbers of every setting, and which is the fastest."""
    by_setting: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for entry in entries:
        by_setting.setdefault((entry["drafts"], entry["fusion"]), {})[entry["round"]] = entry
    plain = by_setting["none", "Disabled"]
    rows = {f"{drafts} / {fusion}": _row(own, plain) for (drafts, fusion), own in by_setting.items()}

    def best(chosen: list[str]) -> str:
        return min(chosen, key=lambda name: rows[name]["seconds"])

    fixed_fusion = [name for name in rows if name.startswith("none / R_t")]
    fixed_drafts = [name for name in rows if name.startswith("Fixed") and name.endswith("/ Disabled")]
    both_fixed = [name for name in rows if name.startswith("Fixed") and "R_t" in name]
    named = {
        "none": "none / Disabled", "speculation": "Auto / Disabled", "fusion": "none / Auto", "both": "Auto / Auto",
        "best fixed speculation": best(fixed_drafts), "best fixed fusion": best(fixed_fusion),
        "best fixed of both": best(both_fixed),
    }  # fmt: skip
    return {
        "tail_seconds": round(statistics.median(entry["tail"] for entry in plain.values()), 3),
        "named": {what: {"setting": name} | rows[name] for what, name in named.items()},
        "fastest": best(list(named.values())),
        "settings": rows,
    }


def _row(own: dict[int, dict[str, Any]], plain: dict[int, dict[str, Any]]) -> dict[str, Any]:
    rounds = sorted(own)
    ratios = [plain[number]["seconds"] / own[number]["seconds"] for number in rounds]
    won = [(plain[number]["seconds"] - own[number]["seconds"]) / plain[number]["tail"] for number in rounds]
    errors = [own[number]["simulated"] / own[number]["seconds"] - 1 for number in rounds if own[number]["simulated"]]
    hindsight, predicted = (
        [own[number][name] / own[number]["seconds"] - 1 for number in rounds if own[number][name]]
        for name in ("by_own_costs", "predicted")
    )
    return {
        "seconds": round(statistics.median(own[number]["seconds"] for number in rounds), 3),
        "times_as_fast": [round(value, 3) for value in statistics.quantiles(ratios, n=4, method="inclusive")],
        "share_of_tail_won": round(statistics.median(won), 3),
        "simulated_error": round(statistics.median(errors), 4) if errors else None,
        "simulated_errors": [round(error, 3) for error in errors],
        "by_own_costs_errors": [round(error, 3) for error in hindsight],
        "predicted_errors": [round(error, 3) for error in predicted],
        "moved": statistics.median(own[number]["moved"] for number in rounds),
        "threshold": [int(own[number]["threshold"] or 0) for number in rounds],
    }


def main() -> int:
    """Prints a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), default="paced-E")
    parser.add_argument(
        "--drafts", nargs="+", choices=list(DRAFTS), default=list(DRAFTS), help="none, Auto and a fixed"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error(f"--rounds is {arguments.rounds}, must be at least 2: quartiles are over rounds")
    if not {"none", "Auto"} < set(arguments.drafts):
        parser.error("--drafts needs none, Auto and at least one fixed length, which are compared")
    entries, same = measure(arguments.scenario, arguments.rounds, arguments.drafts)
    result = {"scenario": arguments.scenario, "rounds": arguments.rounds, "same_tokens": same, **report(entries)}
    result["load"] = os.getloadavg()[2]
    for what, row in result["named"].items():
        print(f"{what:>24}: {row}")
    print(json.dumps(result) if arguments.json else {k: v for k, v in result.items() if k != "settings"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
