"""`make cluster`: start a cluster, print its kubeconfig, and stop it on Ctrl-C or SIGTERM.

Owns the command line. Its processes end with it, also after SIGKILL.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from pathlib import Path

from tests.cluster import images, leftovers, toolchain
from tests.cluster.cluster import Cluster
from tests.cluster.monitored import page


def main() -> None:
    """Parse, start, wait, stop."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster", description="A real Kubernetes cluster on this machine."
    )
    parser.add_argument(
        "--level", default="node", choices=["api", "control-plane", "node"], help="only 'node' needs root"
    )
    parser.add_argument("--nodes", type=int, default=1, help="real nodes")
    parser.add_argument("--gpus", type=int, default=8, help="nvidia.com/gpu advertised by each real node")
    parser.add_argument("--kwok-nodes", type=int, default=0, help="fake nodes beside them")
    parser.add_argument(
        "--image", type=Path, action="append", default=[], help="image archive to import; may be repeated"
    )
    parser.add_argument("--python-image", action="store_true", help=f"import {images.PYTHON}, built on first use")
    parser.add_argument("--prepare", action="store_true", help="only build binaries and images into the cache")
    parser.add_argument("--clean", action="store_true", help="only remove what crashed runs left")
    arguments = parser.parse_args()
    if arguments.clean:
        print(f"cleaned slots: {leftovers.sweep() or 'none'}")
        return
    if arguments.prepare:
        prepare()
        return
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    archives = [*arguments.image, *([images.python()] if arguments.python_image else [])]
    level, nodes, gpus = arguments.level, arguments.nodes, arguments.gpus
    with Cluster(level=level, nodes=nodes, gpus=gpus, images=archives) as cluster:
        if arguments.kwok_nodes:
            cluster.add_kwok_nodes(arguments.kwok_nodes)
        print(f"export KUBECONFIG={cluster.kubeconfig}", flush=True)
        print("up until Ctrl-C", file=sys.stderr, flush=True)
        stop.wait()


def prepare() -> None:
    """Build the binaries, and as root the images that most tests need, so that no test waits for a compiler.

    All requirements are checked before the first compilation.
    """
    toolchain.require("nodes" if os.geteuid() == 0 else "binaries")
    for name in toolchain.PACKAGES:
        print(toolchain.binary(name), flush=True)
    toolchain.kwok_stages()
    if os.geteuid() == 0:
        for make in (images.pause, images.python, images.operator, images.coordinator, page.bundle):
            print(make(), flush=True)


if __name__ == "__main__":
    main()
