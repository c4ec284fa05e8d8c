"""`make observe`: a cluster with all observability tools, and a job that trains, until Ctrl-C.

Owns the command line. With `--pictures FOLDER` it waits until there is something to see, saves a picture of every
dashboard there, and ends. Its processes end with it, also after SIGKILL.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
from pathlib import Path

from tests.cluster.monitored.observed import Observed

ITERATIONS = 40
"""Iterations of the job before pictures are taken: several checkpoints, a lost worker, and graphs with a middle."""
SINCE = "now-6m"


def main() -> None:
    """Parse, start, wait or draw, stop."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster.monitored.observe", description="A cluster to be looked at."
    )
    parser.add_argument("--interval", default="5s", help="between two scrapes")
    parser.add_argument("--pictures", type=Path, help="leave a picture of every dashboard in this folder, and end")
    arguments = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with (
        tempfile.TemporaryDirectory(prefix="rlhf-observe-") as folder,
        Observed(Path(folder), interval=arguments.interval) as observed,
    ):
        _say(observed, arguments.interval)
        if not arguments.pictures:
            stop.wait()
            return
        observed.until_trained(ITERATIONS // 3)
        observed.change()
        observed.lose("generation-1")
        observed.until_trained(ITERATIONS)
        parameters = {"from": SINCE, "scrape": arguments.interval.removesuffix("s")}
        for seen in observed.server.draw(observed.dashboards, arguments.pictures, parameters):
            print(seen.picture, *(f"{panel.title}: {panel.state}" for panel in seen.panels if panel.state != "data"))


def _say(observed: Observed, interval: str) -> None:
    scrape = interval.removesuffix("s")
    print(f"export KUBECONFIG={observed.cluster.kubeconfig}")
    print(f"Prometheus    {observed.monitoring.prometheus.url}")
    print(f"Alertmanager  {observed.monitoring.alertmanager.url}")
    for name in observed.dashboards:
        print(f"{name:<13} {observed.server.address(name, scrape=scrape, **{'from': 'now-15m'})}")
    sys.stdout.flush()
    print("up until Ctrl-C", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
