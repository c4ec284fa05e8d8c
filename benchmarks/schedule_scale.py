"""Cost of the schedule search against problem size, up to 64 devices and 256 micro-batches a pipeline (65 thousand
steps).

One process, one core; budgets count CPU seconds unless `--clock wall`. A large model forward over all devices, a
small one of half its cost in the opposite direction, under a memory cap of `--cap` times the peak of serial 1F1B.
`--json` prints one object as the last line.
"""

import argparse
import json
import time
from typing import Any

from rlhf_planner.schedule.baselines import SERIAL, run_baselines
from rlhf_planner.schedule.instance import Instance, from_json
from rlhf_planner.schedule.schedule_check import check_schedule
from rlhf_planner.schedule.simulate import instance_arrays
from rlhf_planner.schedule.solve import SearchOptions, solve
from rlhf_planner.schedule.tables import steps_by_device

SIZES = ((8, 32), (16, 64), (32, 128), (64, 256))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu", help="what the budget counts")
    parser.add_argument("--seconds", type=float, default=60, help="budget of each size")
    parser.add_argument("--cap", type=float, default=1.5, help="memory cap, in peaks of serial 1F1B")
    parser.add_argument("--largest", action="store_true", help="only the largest size")
    args = parser.parse_args()
    clock = time.process_time if args.clock == "cpu" else time.monotonic
    solve(pair(2, 2), SearchOptions(0.01), clock)  # compile before anything is timed
    rows = []
    for devices, microbatches in SIZES[-1:] if args.largest else SIZES:
        rows.append(measure(pair(devices, microbatches), args.cap, SearchOptions(args.seconds), clock))
        print(rows[-1], flush=True)
    if args.json:
        print(json.dumps({"clock": args.clock, "budget": args.seconds, "capFactor": args.cap, "sizes": rows}))


def pair(devices: int, microbatches: int) -> Instance:
    there = list(range(devices))
    large = {"forward": 2, "backward": 4, "weightGradient": 2, "activation": 1.64}
    small = {"forward": 1, "backward": 2, "weightGradient": 1, "activation": 1.0}
    pipelines = [
        {"name": "actor", "stageDevices": there, "microbatches": microbatches, **large},
        {"name": "critic", "stageDevices": there[::-1], "microbatches": microbatches, **small},
    ]
    return from_json({"devices": devices, "pipelines": pipelines})


def measure(instance: Instance, factor: float, options: SearchOptions, clock: Any) -> dict[str, Any]:
    serial = run_baselines(instance_arrays(instance))[SERIAL]
    capped = instance.with_cap(round(factor * serial.peak, 2))
    wall, cpu = time.monotonic(), time.process_time()
    result = solve(capped, options, clock)
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    checked = check_schedule(capped, steps_by_device(result.timeline))  # raises when the cap is not kept
    return {
        "devices": instance.devices,
        "microbatches": instance.pipelines[0].microbatches,
        "steps": instance.steps,
        "serial": serial.makespan,
        "makespan": checked.makespan,
        "lowerBound": result.lower_bound,
        "aboveBound": round(checked.makespan / result.lower_bound - 1, 5),
        "cap": capped.memory_cap,
        "peak": round(max(checked.peaks), 4),
        "method": result.method,
        "cutShort": result.cut_short,
        "endedByClock": result.by_clock,
        "cpuSeconds": round(cpu, 1),
        "wallSeconds": round(wall, 1),
    }


if __name__ == "__main__":
    main()
