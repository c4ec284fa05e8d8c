"""Measures the operator at scale on a real API server with fake (kwok) nodes, relative to the raw limit of the same
run.

`python benchmarks/operator_scale.py [--scenario S1,S5] [--scale 0.1] [--json]`. Every scenario has its own cluster. In
S1 to S3, before the operator starts, a bare asyncio client creates the same objects with POST and with server-side
apply. That is the limit of this machine under its present load. Ratios to that limit compare between machines; rates do
not. `--results FILE` adds the results to those of earlier runs, so that scenarios can be run one at a time. Has the
same requirements as tests/cluster (Go; no root).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.operator_scale_rig.scenarios import SCENARIOS, RigSettings


def machine() -> dict[str, Any]:
    """Return the machine, and its other load."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    return {"processor": model, "cores": os.cpu_count(), "load_before": os.getloadavg()[0]}


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    message = "; ".join(f"{name}: {description}" for name, (description, _) in SCENARIOS.items())
    parser.add_argument("--scenario", default=",".join(SCENARIOS), help=f"comma-separated; {message}")
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of jobs and pods; 0.1 for a quick run")
    parser.add_argument("--concurrency", type=int, default=32, help="requests of the bare client at once")
    parser.add_argument("--idle-seconds", type=float, default=330.0, help="for which S4 looks on")
    message = "no controllers, scheduler and fake nodes beside API server and etcd where a scenario can do without"
    parser.add_argument("--bare", action="store_true", help=message)
    parser.add_argument("--operator", action="append", default=[], metavar="ARGUMENT", help="passed on; repeatable")
    parser.add_argument("--results", type=Path, metavar="FILE", help="JSON by scenario; others in it are kept")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    options.scenarios = [item.strip() for item in options.scenario.split(",")]
    # S6 is the second half of S4.
    options.scenarios = list(dict.fromkeys("S4" if scenario == "S6" else scenario for scenario in options.scenarios))
    unknown = [scenario for scenario in options.scenarios if scenario not in SCENARIOS]
    if unknown:
        parser.error(f"--scenario: {', '.join(unknown)}: must be among {', '.join(SCENARIOS)}")
    if not 0 < options.scale <= 10:
        parser.error(f"--scale: {options.scale}: must be above 0 and at most 10")
    return options


def merge(path: Path, name: str, found: dict[str, Any]) -> None:
    """Add one scenario's figures to those of earlier runs in a file."""
    earlier = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(earlier | {name: found}, indent=1) + "\n")


def main() -> None:
    """Print each scenario's figures when it is done."""
    options = arguments()
    # Same as Ctrl-C: the cluster and the operator end with this process.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings = RigSettings(
        options.scale, options.concurrency, options.idle_seconds, options.bare, tuple(options.operator)
    )
    results: dict[str, Any] = {"settings": asdict(settings), "machine": machine(), "scenarios": {}}
    print("settings", results["settings"])
    print("machine", results["machine"], flush=True)
    for name in options.scenarios:
        description, measure = SCENARIOS[name]
        print(f"{name}: {description}", flush=True)
        begun = time.monotonic()
        result = asyncio.run(measure(settings))
        result |= {"load_after": os.getloadavg()[0], "took_seconds": time.monotonic() - begun}
        results["scenarios"][name] = result
        for key, value in result.items():
            print(f"  {key:36} {value if not isinstance(value, float) else f'{value:.4g}'}", flush=True)
        if options.results is not None:
            merge(options.results, name, {"settings": results["settings"], "machine": results["machine"]} | result)
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
