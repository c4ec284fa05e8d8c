"""A hostile tenant beside three healthy jobs on a real cluster, for some minutes.

`python benchmarks/hostile_tenant.py --minutes 10 --seed 1 [--json]`. Needs what tests/cluster needs at level `node`:
root, Linux, and `make cluster-prepare`. Exit code 1 when a healthy job did not end Complete with bitwise the weights of
the undisturbed `rlhf run`, when the operator's process ended or its memory grew, when a reconcile failed by an error of
our own, or when an object that is not ours was changed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.cluster import Cluster, environment, images
from tests.cluster.hostile_run import HEALTHY, TenantOutcome, load, run
from tests.cluster.undisturbed import Undisturbed

ROOT = Path(__file__).resolve().parents[1]
ITERATIONS_A_MINUTE = 2
"""Of the healthy jobs; their gates spread them over the time."""


def hostile(folder: Path, minutes: float, outcome: TenantOutcome) -> str:
    """Fills the outcome as far as it comes, and answers the undisturbed run's weights."""
    iterations = max(4, round(ITERATIONS_A_MINUTE * minutes))
    shipped = [images.mounted(Path(environment.PYTHON).parent), images.python()]
    with (
        Undisturbed(folder / "undisturbed", iterations=iterations) as undisturbed,
        Cluster(level="node", images=shipped) as cluster,
    ):
        cluster.define(ROOT / "crds" / "rlhfjobs.yaml")
        run(cluster, folder, iterations, outcome, minutes=minutes)
        return undisturbed.weights()


def main() -> int:
    """Runs, and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    given = parser.parse_args()
    if given.minutes <= 0:
        parser.error(f"--minutes: {given.minutes}: must be above 0")
    with tempfile.TemporaryDirectory(prefix="rlhf-hostile-") as folder:
        Path(folder).chmod(0o755)  # pods are another user
        outcome, weights, wrong = TenantOutcome(given.seed), "", ""
        try:
            weights = hostile(Path(folder), given.minutes, outcome)
        except (AssertionError, RuntimeError, TimeoutError) as error:
            traceback.print_exc()
            wrong = f"{type(error).__name__}: {error}"
    same = bool(weights) and outcome.weights == [weights] * HEALTHY
    served = outcome.operators == 1 and outcome.healthy and not outcome.bugs
    passed = same and served and outcome.flat and not outcome.changed and not wrong
    print(f"{sum(outcome.posted.values())} objects; same weights: {same}; {wrong or 'nothing went wrong'}")
    if given.json:
        reported = {"passed": passed, "same_weights": same, "wrong": wrong}
        print(json.dumps(reported | outcome.written() | load()))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
