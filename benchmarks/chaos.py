"""Kills processes of a deterministic job at random moments and compares its weights with an undisturbed run's.

`python benchmarks/chaos.py --kills 30 --seed 1 [--json]`. One undisturbed run first; then runs with up to
KILLS_A_RUN kills each until there were enough. Every run must end with exit code 0 and bitwise the same actor.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.chaos import Ended, Kills, run_job
from tests.support.local_job import PROCESSES, write_job

from rlhf_api.algorithms import ALGORITHMS

KILLS_A_RUN = 10


def report(ended: Ended, reference: Ended) -> dict[str, object]:
    """What the last line says of one run."""
    return {
        "code": ended.code,
        "seconds": round(ended.seconds, 1),
        "kills": ended.kills,
        "same_weights": ended.code == 0 and ended.weights == reference.weights != "",
    }


def main() -> int:
    """Exit code 1 when any run failed or ended with other weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--algorithm", choices=tuple(ALGORITHMS), default="ppo")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlhf-chaos-") as folder:
        root = Path(folder)
        manifest = write_job(root, algorithm=arguments.algorithm, iterations=arguments.iterations)
        reference = run_job(manifest, root / "undisturbed")
        print(
            f"undisturbed: exit {reference.code}, {reference.seconds:.0f} s, actor {reference.weights[:12]}", flush=True
        )
        runs: list[dict[str, object]] = []
        done = 0
        while done < arguments.kills:
            seed = arguments.seed + len(runs)
            kills = Kills(seed, min(KILLS_A_RUN, arguments.kills - done), PROCESSES)
            ended = run_job(manifest, root / f"seed-{seed}", kills=kills)
            runs.append({"seed": seed, **report(ended, reference)})
            done += max(1, len(ended.kills))
            print(f"seed {seed}: {runs[-1]}", flush=True)
            if ended.code != 0:
                print(ended.output[-4000:])
    passed = all(run["same_weights"] for run in runs) and reference.code == 0
    if arguments.json:
        print(json.dumps({"passed": passed, "kills": done, "undisturbed_seconds": reference.seconds, "runs": runs}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
