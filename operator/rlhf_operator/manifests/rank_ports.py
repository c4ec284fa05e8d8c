"""What a pod of several training ranks has beyond one rank's: a launcher, and an entry of each variable for each rank.

Rule: pure, and empty for a pod of one rank, which stays as it is. All ranks of a pod have its host name, and ports that
follow one another from those of `names`; peers of the job reach them all, and nobody else does. Metrics and liveness of
all ranks are served by the launcher at the port at which any other pod serves its own, so probes, annotations and
NetworkPolicy are those of every pod; where the ranks serve them to it, nobody outside of the pod gets in.
"""

from typing import Final

from rlhf_common import names
from rlhf_common.names import Env

LAUNCHER: Final = "rlhf_workers.rank_launcher"
"""The module that runs in a pod of several ranks."""
LOOPBACK: Final = "127.0.0.1"
SEPARATOR: Final = ","
"""Between the entries of the ranks of a pod."""


def entries(ranks: int, host: str, *, gpus: bool) -> dict[str, str]:
    """Return the variables of the launcher of so many ranks, of a pod with this host name; none for one rank."""
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
    """Return the value of a variable that has an entry for each rank."""
    return SEPARATOR.join(of_ranks)
