"""The twelve published instances of the fused schedule: ours, ours with split backward, baselines, bounds, beside
the paper.

One process, one core. Budgets count CPU seconds of this process by default (it has one thread), so that a shared
machine gives the same search as an idle one; wall seconds are printed beside them. `--json` prints one object as the
last line.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from rlhf_planner.schedule.baselines import SERIAL, chimera, ideal_interleaved, interleaved, serial
from rlhf_planner.schedule.bounds import published_bound
from rlhf_planner.schedule.published import PUBLISHED, Published
from rlhf_planner.schedule.schedule_check import check_schedule
from rlhf_planner.schedule.schedule_figures import draw_many
from rlhf_planner.schedule.simulate import instance_arrays
from rlhf_planner.schedule.solve import SearchOptions, Solution, solve
from rlhf_planner.schedule.tables import steps_by_device

CHUNKS = 4  # virtual stages of the interleaved baseline
TRANSFER = 0.5  # time between stages in the run that makes transfers cost something: a tenth to half of a forward step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--only", type=int, nargs="*", help="instances to run; all twelve when left out")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu", help="what the budgets count")
    parser.add_argument("--peak", type=float, default=60, help="seconds of each run without split backward")
    parser.add_argument("--split", type=float, default=30, help="seconds of each run with split backward")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="draw instances 1 and 7 there, and stop")
    args = parser.parse_args()
    clock = time.process_time if args.clock == "cpu" else time.monotonic
    if args.pictures is not None:
        for published in (PUBLISHED[1], PUBLISHED[7]):
            picture(published, args, clock)
        return
    cold = time.process_time()
    solve(PUBLISHED[5].instance(), SearchOptions(0.01), clock)
    compile_seconds = time.process_time() - cold
    print(f"first call, compiling or loading machine code: {compile_seconds:.1f} s CPU")
    rows = []
    for published in PUBLISHED:
        if args.only is None or published.id in args.only:
            rows.append(measure(published, args, clock))
            print(line(rows[-1]), flush=True)
    if args.json:
        print(json.dumps({"clock": args.clock, "compileSeconds": compile_seconds, "instances": rows, **verdicts(rows)}))


def picture(published: Published, args: argparse.Namespace, clock: Any) -> None:
    """Serial, fused and fused with split backward under one time axis, as PNG."""
    instance = published.instance()
    plain = serial(instance_arrays(instance))
    fused = solve(instance, SearchOptions(args.peak), clock)
    split = solve(instance, SearchOptions(args.split, split=True), clock)
    charts = [
        (f"{name}: makespan {timeline.makespan:g}, idle {timeline.bubble:.0%}", steps_by_device(timeline))
        for name, timeline in (
            ("Serial 1F1B", plain),
            ("Fused", fused.timeline),
            ("Fused, split backward", split.timeline),
        )
    ]
    path = args.pictures / f"schedule-instance-{published.id}.png"
    path.write_bytes(draw_many(instance, charts, "png"))
    print(path)


def measure(published: Published, args: argparse.Namespace, clock: Any) -> dict[str, Any]:
    instance = published.instance()
    fused = run(instance, SearchOptions(args.peak), clock)
    split = run(instance, SearchOptions(args.split, split=True), clock)
    bound = max(published.split_bound, split["lowerBound"])
    slack = max(0.0, 1.03 * bound / split["makespan"] - 1)
    lean = run(instance, SearchOptions(args.split, split=True, makespan_slack=slack), clock)
    paid = published.instance(transfer=TRANSFER)
    cut, cut_paid, both = interleaved(instance, CHUNKS), interleaved(paid, CHUNKS), chimera(instance)
    fused_paid = run(paid, SearchOptions(2.0), clock)
    return {
        "id": published.id,
        "paper": {
            "serial": published.serial,
            "greedy": published.greedy,
            "best": published.best,
            "peak": published.peak,
            "bound": published.bound,
            "splitBound": published.split_bound,
            "searchSeconds": published.search_seconds,
        },
        "boundsEqual": published_bound(instance_arrays(instance)) == published.bound
        and published_bound(instance_arrays(instance, split=True)) == published.split_bound,
        "fused": fused,
        "split": split,
        "splitLean": lean,
        "interleavedIdeal": ideal_interleaved(instance, CHUNKS),
        "interleaved": None if cut is None else cut.makespan,
        "interleavedPaid": None if cut_paid is None else cut_paid.makespan,
        "fusedPaid": fused_paid["makespan"],
        "chimera": None if both is None else both.makespan,
    }


def run(instance: Any, options: SearchOptions, clock: Any) -> dict[str, Any]:
    wall, cpu = time.monotonic(), time.process_time()
    solution: Solution = solve(instance, options, clock)
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    checked = check_schedule(instance, steps_by_device(solution.timeline))
    return {
        "makespan": checked.makespan,
        "peak": round(max(checked.peaks), 6),
        "lowerBound": solution.lower_bound,
        "peakLowerBound": round(solution.peak_bound, 6),
        "atBound": solution.at_bound,
        "peakAtBound": solution.peak_at_bound,
        "method": solution.method,
        "cutShort": solution.cut_short,
        "endedByClock": solution.by_clock,
        "makespanSeconds": round(solution.makespan_seconds, 2),
        "cpuSeconds": round(cpu, 2),
        "wallSeconds": round(wall, 2),
        "serial": solution.baselines[SERIAL].makespan,
        "greedy": [solution.baselines["greedy"].makespan, round(solution.baselines["greedy"].peak, 6)],
    }


def line(row: dict[str, Any]) -> str:
    paper, ours, split, lean = (row[key] for key in ("paper", "fused", "split", "splitLean"))
    return (
        f"{row['id']:>2}  paper {paper['best']:g}/{paper['peak']:g} bound {paper['bound']:g}  "
        f"ours {ours['makespan']:g} in {ours['makespanSeconds']:.2f} s  "
        f"peak {ours['peak']:g} (>= {ours['peakLowerBound']:g}) in {ours['cpuSeconds']:.0f} s  "
        f"split {split['makespan']:g} in {split['makespanSeconds']:.2f} s "
        f"(bound {split['lowerBound']:g}, published terms {paper['splitBound']:g})  "
        f"lean {lean['makespan']:g}/{lean['peak']:g}"
    )


def verdicts(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The questions this benchmark answers, as numbers of instances."""
    return {
        "atBound": sum(
            row["fused"]["makespan"] <= row["paper"]["bound"] and row["fused"]["makespanSeconds"] <= 10 for row in rows
        ),
        "greedyEqual": sum(tuple(row["fused"]["greedy"]) == row["paper"]["greedy"] for row in rows),
        "serialEqual": sum(row["fused"]["serial"] == row["paper"]["serial"] for row in rows),
        "boundsEqual": sum(row["boundsEqual"] for row in rows),
        "peakNoHigher": sum(row["fused"]["peak"] <= row["paper"]["peak"] + 1e-6 for row in rows),
        "peakLower": sum(row["fused"]["peak"] < row["paper"]["peak"] - 1e-6 for row in rows),
        "splitWithinOnePercent": sum(
            row["split"]["makespan"] <= 1.01 * row["paper"]["splitBound"] or row["split"]["atBound"] for row in rows
        ),
        "splitLeanWithinPeak": sum(
            row["splitLean"]["peak"] <= row["paper"]["peak"] + 1e-6
            and row["splitLean"]["makespan"]
            <= 1.03 * max(row["paper"]["splitBound"], row["split"]["lowerBound"]) + 1e-6
            for row in rows
        ),
    }


if __name__ == "__main__":
    main()
