"""Additions to a pod with several training ranks: a launcher, and variables with one entry per rank. Rule: pure.

The ranks of a pod have consecutive ports from those of `names`.
"""

from typing import Final

from rlhf_common import names
from rlhf_common.names import Env

LAUNCHER: Final = "rlhf_workers.rank_launcher"
"""Module that runs in a pod with several ranks."""
LOOPBACK: Final = "127.0.0.1"
SEPARATOR: Final = ","
"""Separator between the entries of a pod's ranks."""


def entries(ranks: int, host: str, *, gpus: bool) -> dict[str, str]:
    """Return the launcher's variables for a number of ranks in a pod with this host name; empty for one rank."""
    if ranks == 1:
        return {}
    listen, metrics, rendezvous = (
        [first + rank for rank in range(ranks)]
        for first in (names.WORKER_PORT, names.RANK_METRICS_PORT, names.RANK_RENDEZVOUS_PORT)
    )
    return {
        Env.RANKS: str(ranks),
        Env.LISTEN: joined([f"[::]:{port}" for port in listen]),
        Env.ADVERTISE: joined([f"{host}:{port}" for port in listen]),
        Env.RANK_METRICS: joined([f"{LOOPBACK}:{port}" for port in metrics]),
        Env.RENDEZVOUS_PORT: joined([str(port) for port in rendezvous]),
        Env.DEVICE: joined([f"cuda:{rank}" if gpus else "cpu" for rank in range(ranks)]),
    }


def joined(of_ranks: list[str]) -> str:
    """Return the value of a variable with one entry per rank."""
    return SEPARATOR.join(of_ranks)
