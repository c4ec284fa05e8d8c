"""A long run of chaos on a real cluster: a deterministic job in pods, and faults by a seed until there were enough.

`python benchmarks/cluster_chaos.py --faults 40 --seed 1 [--json]`. Needs what tests/cluster needs at level `node`:
root, Linux, and `make cluster-prepare`. Every fault is printed with its moment and victim. Exit code 1 when the job did
not end Complete with bitwise the weights of the undisturbed `rlhf run`, when restarts were counted wrongly, or when
something was left after its deletion.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.cluster import Cluster, environment, images
from tests.cluster.chaos import faults
from tests.cluster.chaos_run import ChaosOutcome, iterations, run
from tests.cluster.undisturbed import Undisturbed

ROOT = Path(__file__).resolve().parents[1]


def chaos(folder: Path, count: int, outcome: ChaosOutcome, minutes: float) -> str:
    """Fills the outcome as far as it comes, and answers the undisturbed run's weights."""
    needed = iterations(faults(outcome.seed, count))
    with (
        Undisturbed(folder / "undisturbed", iterations=needed) as undisturbed,
        Cluster(level="node", images=[images.mounted(Path(environment.PYTHON).parent)]) as cluster,
    ):
        cluster.define(ROOT / "crds" / "rlhfjobs.yaml")
        run(cluster, images.MOUNTED, folder / "chaos", count, outcome, within=minutes * 60)
        return undisturbed.weights()


def main() -> int:
    """Runs, and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf, help="no fault begins later; the job still ends")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    given = parser.parse_args()
    if given.faults < 1:
        parser.error(f"--faults: {given.faults}: must be at least 1")
    with tempfile.TemporaryDirectory(prefix="rlhf-chaos-") as folder:
        Path(folder).chmod(0o755)  # pods are another user
        outcome, weights, wrong = ChaosOutcome(given.seed), "", ""
        try:
            weights = chaos(Path(folder), given.faults, outcome, given.minutes)
        except (AssertionError, RuntimeError, TimeoutError) as error:
            traceback.print_exc()
            wrong = f"{type(error).__name__}: {error}"
    same = bool(weights) and outcome.weights == weights
    passed = same and outcome.counted and not outcome.left and not outcome.bugs
    print(f"{len(outcome.done)} of {given.faults} faults; same weights: {same}; {wrong or 'nothing went wrong'}")
    if given.json:
        reported = {"passed": passed, "faults": given.faults, "same_weights": same, "wrong": wrong}
        print(json.dumps(reported | outcome.written() | {"cores": os.cpu_count(), "load": os.getloadavg()[0]}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
