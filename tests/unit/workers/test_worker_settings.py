"""A worker's environment: its meaning, and messages about errors."""

import socket
from pathlib import Path

import pytest

from rlhf_workers.peer_server import free_port
from rlhf_workers.settings import SettingsError, read_settings

WHOLE = {"RLHF_COORDINATOR": "10.0.0.1:7700", "RLHF_GROUP": "training", "RLHF_INDEX": "2"}


def test_the_least_environment() -> None:
    settings = read_settings(WHOLE)
    assert settings.worker == "training-2"
    assert (settings.device, settings.threads, settings.certificates) == ("cpu", 1, None)
    assert (settings.rendezvous_host, settings.rendezvous_port) == ("127.0.0.1", 0)
    assert settings.start_timeout is None


def test_everything_set() -> None:
    more = {
        "RLHF_LISTEN": "0.0.0.0:7710",
        "RLHF_ADVERTISE": "pod-2.job:7710",
        "RLHF_CERTIFICATES": "/certificates",
        "RLHF_DEVICE": "cuda",
        "RLHF_THREADS": "4",
        "RLHF_START_TIMEOUT": "60",
        "RLHF_LOG_FORMAT": "json",
        "RLHF_RENDEZVOUS_PORT": "12345",
        "RLHF_DEVICE_SHARERS": "3",
    }
    settings = read_settings(WHOLE | more)
    assert settings.certificates == Path("/certificates")
    assert (settings.device, settings.threads, settings.start_timeout) == ("cuda:0", 4, 60.0)
    assert (settings.rendezvous_host, settings.rendezvous_port) == ("pod-2.job", 12345)
    assert settings.json_logs
    assert settings.device_sharers == 3


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RLHF_COORDINATOR", "", "RLHF_COORDINATOR is not set"),
        ("RLHF_COORDINATOR", "here", "RLHF_COORDINATOR='here': needs host:port"),
        ("RLHF_LISTEN", "0.0.0.0:99999", "RLHF_LISTEN='0.0.0.0:99999': needs host:port"),
        ("RLHF_GROUP", "coordinator", "must be one of generation, inference, training"),
        ("RLHF_INDEX", "-1", "RLHF_INDEX='-1': must be a whole number of at least 0"),
        ("RLHF_THREADS", "0", "RLHF_THREADS='0': must be a whole number of at least 1"),
        ("RLHF_DEVICE_SHARERS", "0", "RLHF_DEVICE_SHARERS='0': must be a whole number of at least 1"),
        ("RLHF_DEVICE", "tpu:0", "RLHF_DEVICE='tpu:0': must be cpu or cuda:N"),
        ("RLHF_METRICS", "7790", "RLHF_METRICS='7790': needs host:port"),
    ],
)
def test_a_wrong_variable_is_named_with_its_value(name: str, value: str, words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read_settings(WHOLE | {name: value})
    assert words in str(caught.value)


def test_a_host_that_dns_does_not_know_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(OSError, match=r"RLHF_RENDEZVOUS=rank.job.svc cannot be found: .*name resolution; does DNS"):
        free_port("rank.job.svc")
