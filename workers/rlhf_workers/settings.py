"""Settings of a worker process, read from its environment (`names.Env`) and checked.

Rule: an error names the variable.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf_common.names import Env, Group, worker_name

WORKER_GROUPS = (Group.GENERATION, Group.INFERENCE, Group.TRAINING)


class SettingsError(ValueError):
    """An environment variable is missing or wrong."""


@dataclass(frozen=True)
class WorkerSettings:
    """One worker's place in the job."""

    coordinator: str
    """Coordinator's address, host:port."""
    group: Group
    index: int
    listen: str
    """Address of its gRPC server, host:port; port 0 takes a free one."""
    advertise: str
    """Address under which peers reach it, host:port; empty: `listen`; port 0: the bound port."""
    rendezvous: str
    """Host under which training peers reach it; empty: that of `advertise` or `listen`."""
    certificates: Path | None
    metrics: str
    """Address of the Prometheus endpoint, host:port; empty for none."""
    device: str
    threads: int
    start_timeout: float | None
    """Seconds to wait for the first welcome; None waits forever."""
    json_logs: bool
    rendezvous_port: int = 0
    """Port of its TCPStore; 0: a free one."""
    grace: float = 0.0
    """Seconds between SIGTERM and SIGKILL; 0: unknown."""
    device_sharers: int = 1
    """Processes on its device, including itself."""

    @property
    def worker(self) -> str:
        """Its name in logs and messages."""
        return worker_name(self.group, self.index)

    @property
    def rendezvous_host(self) -> str:
        """Host under which its TCPStore can be reached."""
        return self.rendezvous or split_address(Env.ADVERTISE, self.advertise or self.listen)[0]


def split_address(variable: str, value: str) -> tuple[str, int]:
    """Return (host, port) of `host:port`, the brackets of an IPv6 host removed; SettingsError names `variable`."""
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise SettingsError(f"{variable}={value!r}: needs host:port, such as 10.0.0.7:7710")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Return `host:port`, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def read_settings(environ: Mapping[str, str]) -> WorkerSettings:
    """Return the settings of this process; SettingsError names the variable and what it needs."""
    group = _required(environ, Env.GROUP)
    if group not in WORKER_GROUPS:
        raise SettingsError(f"{Env.GROUP}={group!r}: must be one of {', '.join(WORKER_GROUPS)}")
    listen = environ.get(Env.LISTEN) or "127.0.0.1:0"
    addresses = {Env.COORDINATOR: _required(environ, Env.COORDINATOR), Env.LISTEN: listen}
    addresses |= {name: environ[name] for name in (Env.ADVERTISE, Env.METRICS) if environ.get(name)}
    for name, address in addresses.items():
        split_address(name, address)
    folder = environ.get(Env.CERTIFICATES)
    timeout = environ.get(Env.START_TIMEOUT)
    return WorkerSettings(
        coordinator=addresses[Env.COORDINATOR],
        group=Group(group),
        index=_number(Env.INDEX, _required(environ, Env.INDEX), 0),
        listen=listen,
        advertise=environ.get(Env.ADVERTISE, ""),
        rendezvous=environ.get(Env.RENDEZVOUS, ""),
        rendezvous_port=_number(Env.RENDEZVOUS_PORT, environ.get(Env.RENDEZVOUS_PORT) or "0", 0),
        certificates=Path(folder) if folder else None,
        metrics=environ.get(Env.METRICS, ""),
        device=_device(environ.get(Env.DEVICE) or "cpu"),
        threads=_number(Env.THREADS, environ.get(Env.THREADS) or "1", 1),
        start_timeout=float(_number(Env.START_TIMEOUT, timeout, 1)) if timeout else None,
        json_logs=environ.get(Env.LOG_FORMAT) == "json",
        grace=float(_number(Env.GRACE, environ.get(Env.GRACE) or "0", 0)),
        device_sharers=_number(Env.DEVICE_SHARERS, environ.get(Env.DEVICE_SHARERS) or "1", 1),
    )


def _required(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name)
    if not value:
        raise SettingsError(f"{name} is not set; a worker needs {Env.COORDINATOR}, {Env.GROUP} and {Env.INDEX}")
    return value


def _number(name: str, value: str, least: int) -> int:
    if not value.isdigit() or int(value) < least:
        raise SettingsError(f"{name}={value!r}: must be a whole number of at least {least}")
    return int(value)


def _device(value: str) -> str:
    kind, _, number = value.partition(":")
    if value == "cpu" or (kind == "cuda" and (number.isdigit() or value == "cuda")):
        return "cuda:0" if value == "cuda" else value
    raise SettingsError(f"{Env.DEVICE}={value!r}: must be cpu or cuda:N")
