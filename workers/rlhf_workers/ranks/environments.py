"""The environment of each rank in a pod with several, derived from the launcher's environment. Pure.

Rule: the entries of a variable in OF_RANKS are separated by commas, one per rank. A rank reads the result as in a pod
of its own (`settings`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rlhf_common.names import Env, worker_name
from rlhf_workers.settings import SettingsError, split_address

SEPARATOR: Final = ","
OF_RANKS: Final = (Env.LISTEN, Env.ADVERTISE, Env.DEVICE, Env.RENDEZVOUS_PORT, Env.RANK_METRICS)
"""Variables with one entry per rank."""


@dataclass(frozen=True)
class RankEnvironment:
    """Environment of one rank."""

    name: str
    """Name of the worker, such as training-9."""
    environment: dict[str, str]
    """Complete environment."""
    endpoint: str
    """host:port of its metrics and liveness."""


def rank_environments(environ: Mapping[str, str]) -> list[RankEnvironment]:
    """Return the ranks of this pod, in order. Raises SettingsError, which names the variable."""
    ranks = _number(environ, Env.RANKS)
    if ranks < 1:
        raise SettingsError(f"{Env.RANKS}={ranks}: must be at least 1")
    pod, group = _number(environ, Env.INDEX), environ.get(Env.GROUP, "")
    entries = {name: _entries(environ, name, ranks) for name in OF_RANKS}
    for address in entries[Env.RANK_METRICS]:
        split_address(Env.RANK_METRICS, address)
    shared = {name: value for name, value in environ.items() if name not in {Env.RANKS, Env.RANK_METRICS}}
    environments = []
    for rank in range(ranks):
        own = {name.value: entries[name][rank] for name in OF_RANKS if name is not Env.RANK_METRICS}
        index, endpoint = pod * ranks + rank, entries[Env.RANK_METRICS][rank]
        environment = shared | own | {Env.INDEX.value: str(index), Env.METRICS.value: endpoint}
        environments.append(RankEnvironment(worker_name(group, index), environment, endpoint))
    return environments


def _entries(environ: Mapping[str, str], name: str, ranks: int) -> list[str]:
    value = environ.get(name, "")
    entries = [entry.strip() for entry in value.split(SEPARATOR)]
    if len(entries) != ranks or not all(entries):
        raise SettingsError(f"{name}={value!r}: needs {ranks} entries, one a rank, separated by commas")
    return entries


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    if not value.isdigit():
        raise SettingsError(f"{name}={value!r}: must be a whole number, as a pod of several ranks has it")
    return int(value)
