"""Real worker processes of a benchmark, pinned to one core each, and a training rank on any core."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

from benchmarks.paced_worker import StepPace
from tests.support.loopback import free_address

from rlhf_common.names import Env


@contextmanager
def pinned_workers(folder: Path, address: str, groups: Sequence[str], pace: StepPace | None = None) -> Iterator[None]:
    """Run a worker for each of `groups` on its own core, with logs in `folder`; `address` is the coordinator's.

    Workers with a `pace` may share a core; without it, raises SystemExit on a machine with too few cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    if pace is None and len(cores) < len(groups):
        raise SystemExit(f"this benchmark pins {len(groups)} workers to a core each, and there are {len(cores)}")
    module = "rlhf_workers" if pace is None else "benchmarks.paced_worker"
    places = [(group, [core]) for group, core in zip(groups, cycle(cores), strict=False)]
    places.append(("training", cores))
    indices: Counter[str] = Counter()
    started = []
    for group, place in places:
        variables = {
            Env.COORDINATOR: address, Env.GROUP: group, Env.INDEX: str(indices[group]), Env.DEVICE: "cpu",
            Env.THREADS: "1", Env.LISTEN: free_address(), Env.RENDEZVOUS: "127.0.0.1", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).resolve().parents[1]), **({} if pace is None else pace.environment()),
        }  # fmt: skip
        environment = {**os.environ, **{str(name): value for name, value in variables.items()}}
        with (folder / f"{group}-{indices[group]}.log").open("w") as log:
            command = ["taskset", "-c", ",".join(map(str, place)), sys.executable, "-m", module]
            started.append(subprocess.Popen(command, env=environment, stderr=log, stdout=log, cwd=folder))
        indices[group] += 1
    try:
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(30)
