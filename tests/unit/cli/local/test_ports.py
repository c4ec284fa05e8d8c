"""Ports of a local job are distinct and outside the range of outgoing connections."""

import socket
from collections import Counter
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import yaml

from rlhf_api.job import RLHFJob
from rlhf_api.yaml_document import Document
from rlhf_cli.load_job import LoadedJob
from rlhf_cli.local import ports
from rlhf_cli.local.devices import LocalMachine
from rlhf_cli.local.errors import RunError
from rlhf_cli.local.local_job import plan_processes
from rlhf_cli.local.ports import LOOPBACK, HeldPorts, JobPorts, claim, free_ports
from rlhf_cli.local.run_folder import RunPaths
from rlhf_common.names import Env, ExitCode

MANIFEST = """
apiVersion: rlhf.dev/v1alpha1
kind: RLHFJob
metadata: {name: ports}
spec:
  algorithm: {ppo: {miniBatchSize: 8}}
  models:
    actor: {path: /models/actor}
    reward: {function: {file: /reward.py}}
  prompts: {path: /prompts.jsonl}
  rollout: {batchSize: 8}
  generation: {replicas: 3}
  inference: {replicas: 2}
  training: {microBatchSize: 2, parallelism: {pipeline: 2, data: 2}}
"""
VARIABLES = (Env.LISTEN, Env.METRICS, Env.RENDEZVOUS_PORT)
"""Variables that name a port that a process opens."""


def ports_of_a_job(placement: str, port: int | None = None) -> list[int]:
    """Return every port that a process of the job opens, in the order of the processes."""
    document = yaml.safe_load(MANIFEST)
    document["spec"]["placement"] = placement
    document["spec"]["generation"]["replicas"] = 4
    job = RLHFJob.model_validate(document)
    loaded = LoadedJob(Document(document), job, paths=RunPaths(Path("/run"), Path("/")))
    local = plan_processes(loaded, LocalMachine(tuple(range(64))), port)
    opened = [process.env[name] for process in local.processes for name in VARIABLES if name in process.env]
    return [int(value.rpartition(":")[2]) for value in opened]


@pytest.mark.parametrize(("placement", "count"), [("Dedicated", 2 * 11 + 4), ("Colocated", 2 * 7 + 4)])
def test_no_two_processes_of_a_job_open_the_same_port(placement: str, count: int) -> None:
    opened = ports_of_a_job(placement)
    assert len(opened) == count
    assert [port for port, times in Counter(opened).items() if times > 1] == []
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(10_000 <= port < max(first_ephemeral, 20_000) for port in opened)


def test_the_port_that_was_asked_for_is_given_to_the_coordinator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # Free until the coordinator listens, so it may well be the next that looks free.
    monkeypatch.setattr(ports, "is_free", lambda port: True)
    wanted = next(free_ports(Random(3), ports.is_free))
    job_ports = JobPorts(free_ports(Random(3), ports.is_free), claim(wanted))
    workers = [job_ports.of_worker(is_rank=True) for _ in range(100)]
    assert job_ports.of_coordinator().listen == job_ports.coordinator == wanted
    assert wanted not in {port for worker in workers for port in (worker.listen, worker.metrics, worker.rendezvous)}


def test_only_ranks_get_a_port_for_the_rendezvous() -> None:
    job_ports = JobPorts(iter(range(20_000, 20_100)))
    assert job_ports.of_coordinator().rendezvous is None
    assert job_ports.of_worker(is_rank=False).rendezvous is None
    assert job_ports.of_worker(is_rank=True).rendezvous == 20_006


def test_a_port_in_use_is_not_handed_out_and_cannot_be_claimed() -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(RunError, match=f"--port {taken}: the address .* is in use") as refused:
            claim(taken)
        assert refused.value.exit_code == ExitCode.ADDRESS_IN_USE
    assert all(port % 2 == 0 for port in islice(free_ports(Random(1), lambda port: port % 2 == 0), 50))


def test_held_ports_are_those_of_one_run_until_it_ends_and_its_servers_listen_there_again_and_again() -> None:
    with HeldPorts() as reserved, HeldPorts() as reserved_by_another:
        port = next(free_ports(Random(), reserved.take))
        assert not reserved_by_another.take(port), "before its process listens"
        for _ in range(2):
            with socket.create_server((LOOPBACK, port)) as server:
                socket.create_connection(server.getsockname()).close()
                assert not reserved_by_another.take(port)
        assert not reserved_by_another.take(port), "between its process's end and the next start"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((LOOPBACK, port)).close()
