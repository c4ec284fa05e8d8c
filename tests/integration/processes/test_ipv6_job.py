"""A whole job of real processes that use IPv6 only: coordinator, workers, weights, ranks, metrics."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.jobs import local_job

from rlhf_cli import run
from rlhf_cli.local.local_job import LocalJob, prepare_job
from rlhf_cli.local.ports import LOOPBACK
from rlhf_cli.run import RunOptions, run_job
from rlhf_common.names import Env

pytestmark = pytest.mark.full


ITERATIONS = 2
ADDRESSES = {Env.COORDINATOR, Env.LISTEN, Env.ADVERTISE, Env.METRICS}


def by_ipv6(name: str, value: str) -> str:
    """Return a variable of a process with the IPv6 loopback address."""
    if name in ADDRESSES:
        return value.replace(f"{LOOPBACK}:", "[::1]:")
    return "::1" if name == Env.RENDEZVOUS else value


def test_a_job_trains_by_ipv6_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepared(*arguments: Any, **more: Any) -> LocalJob:
        local = prepare_job(*arguments, **more)
        moved = [
            replace(process, env={name: by_ipv6(name, value) for name, value in process.env.items()})
            for process in local.processes
        ]
        assert not [value for item in moved for value in item.env.values() if LOOPBACK in value]
        return replace(local, processes=moved, address=local.address.replace(LOOPBACK, "[::1]"))

    monkeypatch.setattr(run, "prepare_job", prepared)
    manifest = local_job.write_job(tmp_path / "job", iterations=ITERATIONS)
    assert run_job(RunOptions(manifest, tmp_path / "run", resume=False, port=None, plain=True)) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == list(range(ITERATIONS))
