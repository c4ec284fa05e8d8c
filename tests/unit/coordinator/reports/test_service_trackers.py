"""Trackers that are services: files of their libraries without a network, and the same run after a restart.

No tracker can delay or end a job.
"""

import importlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf_api.job import RLHFJob
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.reports.trackers import run_trackers, service_tracker
from rlhf_coordinator.reports.trackers.run_trackers import RunTrackers, open_trackers
from rlhf_coordinator.reports.trackers.service_tracker import ServiceTracker
from rlhf_coordinator.reports.trackers.services import services_of

METRICS = {"reward": 0.5, "training/actor/loss": -0.25, "rewards/a+b/mean": 1.0, "kl": float("nan")}
WAIT = 300.0
"""Seconds that a library may take to load on a busy machine."""


def job_with(trackers: dict[str, Any]) -> RLHFJob:
    spec = {
        "algorithm": {"grpo": {"groupSize": 2, "miniBatchSize": 8}},
        "models": {"actor": {"path": "policy"}, "reward": {"function": {"file": "reward.py"}}},
        "prompts": {"path": "prompts.jsonl"},
        "rollout": {"batchSize": 8},
        "trackers": trackers,
    }
    body = {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "tiny"}, "spec": spec}
    return RLHFJob.model_validate(body)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_tracker, "FINISH_SECONDS", WAIT)
    monkeypatch.setattr(service_tracker, "ANSWER_SECONDS", WAIT)


@pytest.mark.full
def test_mlflow_has_every_iteration_once_in_one_run_over_a_restart(tmp_path: Path) -> None:
    job = job_with({"mlflow": {"uri": f"file://{tmp_path}/store", "experiment": "tests"}})
    for first, phase in ((0, "Stopped"), (1, "Complete")):
        trackers = open_trackers(tmp_path / "run", first, services=services_of(job))
        for iteration in range(first, first + 2):  # the restart is given iteration 1 again
            trackers.iteration(iteration, METRICS)
        trackers.finish({"phase": phase})
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri=f"file://{tmp_path}/store")
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert (run.info.run_name, run.info.status) == ("tiny", "FINISHED")
    assert run.data.tags["rlhf.dev/job"] == "tiny"
    assert run.data.params["algorithm"] == "grpo"
    history = client.get_metric_history(run.info.run_id, "training/actor/loss")
    assert [(point.step, point.value) for point in history] == [(0, -0.25), (1, -0.25), (2, -0.25)]
    assert "kl" not in run.data.metrics
    assert run.data.metrics["rewards/a_b/mean"] == 1.0, "MLflow refuses the whole iteration for a sign in a name"


@pytest.mark.full
def test_wandb_offline_writes_a_run_folder_and_a_restart_the_same_run(tmp_path: Path) -> None:
    job = job_with({"wandb": {"project": "tests", "mode": "Offline"}})
    for first in (0, 1):
        trackers = open_trackers(tmp_path, first, services=services_of(job))
        trackers.iteration(first, METRICS)
        trackers.finish({"phase": "Complete"})
    runs = sorted((tmp_path / "trackers" / "wandb").glob("offline-run-*/run-*.wandb"))
    run_id = json.loads((tmp_path / "trackers/wandb.json").read_text())["run"]
    assert runs, (tmp_path / "trackers/wandb.log").read_text()
    assert {path.name for path in runs} == {f"run-{run_id}.wandb"}
    assert b"training/actor/loss" in b"".join(path.read_bytes() for path in runs)


def test_a_missing_library_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "wandb" else object())
    with pytest.raises(JobError, match=r"spec.trackers.wandb: .*pip install 'rlhf-operator\[wandb\]'"):
        open_trackers(tmp_path, 0, services=services_of(job_with({"wandb": {"project": "tests"}})))


def test_a_folder_of_the_name_of_a_library_is_not_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb_of_tests").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="there is no module wandb_of_tests"):
        ServiceTracker("wandb_of_tests", tmp_path, 0, {})


def test_a_service_whose_process_cannot_start_is_lost_from_the_beginning(tmp_path: Path) -> None:
    (tmp_path / "trackers").write_text("a file is in the way")
    trackers = open_trackers(tmp_path, 0, services=services_of(job_with({"wandb": {"project": "tests"}})))
    trackers.iteration(0, METRICS)
    trackers.finish({"phase": "Complete"})
    (lost,) = trackers.lost
    assert lost.startswith("wandb is not written from now on:")
    assert lost in (tmp_path / "events.jsonl").read_text()
    assert trackers.backlog() == {}


def test_a_process_ends_without_its_coordinator_even_where_its_library_hangs(tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from rlhf_coordinator.reports.trackers import service_process as process\n"
        "process.END_SECONDS = 0.0\n"
        "process.RUNS = {'json': lambda *_: time.sleep(1e4)}\n"
        "process.main()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, "json"], stdin=subprocess.PIPE, cwd=tmp_path)
    process.communicate(b"{}\n", timeout=WAIT)
    assert process.returncode == 1


def scripted(tmp_path: Path, script: str) -> ServiceTracker:
    """Return a tracker whose process is a script; its library only has to be installed."""
    command: Sequence[str] = (sys.executable, "-c", script)
    return ServiceTracker("json", tmp_path, 0, {}, command=command)


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("raise SystemExit(3)", "its process has ended"),
        ("input(); print('AuthError: no such key', flush=True); input()", "AuthError: no such key"),
    ],
)
def test_a_service_that_fails_is_given_up_with_one_message_and_an_event(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, script: str, problem: str
) -> None:
    tracker = scripted(tmp_path, script)
    tracker._thread.join(WAIT)
    events: list[str] = []

    class Events(ServiceTracker):
        def __init__(self) -> None: ...

        def iteration(self, *_: Any) -> None: ...

        def event(self, time_ns: int, kind: str, message: str, attributes: Any) -> None:
            events.append(f"{kind}: {message}")

        def finish(self, summary: Any) -> None: ...

    trackers = RunTrackers(tmp_path, {"service": tracker, "events": Events()})
    with caplog.at_level(logging.ERROR):
        for iteration in range(3):
            trackers.iteration(iteration, METRICS)
    trackers.finish({"phase": "Complete"})
    (said,) = (record.getMessage() for record in caplog.records if record.name == run_trackers.__name__)
    assert problem in said
    assert events == [f"tracker-lost: {said}"]
    assert trackers.lost == (said,)


def test_a_service_that_hangs_is_given_up_after_its_time_and_waits_for_nobody(tmp_path: Path) -> None:
    now = [0.0]
    tracker = ServiceTracker(
        "json", tmp_path, 0, {}, command=(sys.executable, "-c", "import time; time.sleep(1e4)"), clock=lambda: now[0]
    )
    while tracker._asked is None:  # until its first words are with the process
        time.sleep(0.01)
    tracker.iteration(0, 0, METRICS)
    assert RunTrackers(tmp_path, {"json": tracker}).backlog() == {"json": 2}, "its settings, and an iteration"
    now[0] = WAIT + 1
    with pytest.raises(OSError, match="has not answered for"):
        tracker.iteration(1, 0, METRICS)
    tracker._process.wait(WAIT)


def test_a_queue_that_is_full_gives_the_service_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_tracker, "QUEUED", 2)
    tracker = scripted(tmp_path, "import time; time.sleep(1e4)")

    def give(iterations: int) -> None:
        for iteration in range(iterations):
            tracker.iteration(iteration, 0, METRICS)

    with pytest.raises(OSError, match="it is 2 iterations behind"):
        give(5)
    tracker._process.wait(WAIT)


def test_keys_come_from_secrets_and_are_in_no_settings() -> None:
    trackers = {
        "wandb": {"project": "tests", "apiKey": {"name": "keys", "key": "wandb"}},
        "mlflow": {"uri": "https://mlflow.example", "token": {"name": "keys", "key": "mlflow"}},
    }
    job = job_with(trackers)
    assert {name: key.key for name, key in job.spec.trackers.secret_variables().items()} == {
        "WANDB_API_KEY": "wandb", "MLFLOW_TRACKING_TOKEN": "mlflow",
    }  # fmt: skip
    assert "keys" not in json.dumps(services_of(job))
    with pytest.raises(ValueError, match="trackers"):
        job_with({"mlflow": {"uri": "https://me:s3cret@mlflow.example"}})
