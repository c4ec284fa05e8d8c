"""A live training rank in which an action of its schedule row never ends, as after a deadlock.

Its clock continues, and only its progress counter distinguishes it from a rank that computes for a long time.
"""

import re
from pathlib import Path

import pytest
from tests.support.jobs.chaos import assert_same_weights, run_job
from tests.support.jobs.local_job import write_job

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

ITERATIONS = 4
LIMIT_SECONDS = 20
"""spec.runPolicy.hangTimeoutSeconds: longer than any step of such a small model, and than any delay of its loop."""
DEADLOCK = """
import importlib.util, os, sys, threading

class Hangs:
    def find_spec(self, name, path=None, target=None):
        if name != "rlhf_workers.training.schedule.executor":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), deadlock(module._Run))
        return spec

def deadlock(run):
    do = run.do

    def hanging(self, action):
        if os.path.exists({trained!r}) and os.path.getsize({trained!r}):
            try:
                os.close(os.open({taken!r}, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return do(self, action)
            threading.Event().wait()
        return do(self, action)

    run.do = hanging

sys.meta_path.insert(0, Hangs())
"""
"""Hangs once, in the first process that reaches an action after an iteration was trained."""


def _logs_with(folder: Path, text: str) -> list[str]:
    return [path.name for path in folder.glob("training-*.log") if text in path.read_text()]


def test_ranks_that_hang_in_a_step_start_anew_and_train_the_weights_of_an_undisturbed_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = write_job(tmp_path / "job", iterations=ITERATIONS, every=2)
    settings = (f"runPolicy.hangTimeoutSeconds={LIMIT_SECONDS}",)
    calm = run_job(manifest, tmp_path / "calm", settings=settings)

    (tmp_path / "hook").mkdir()
    trained = tmp_path / "hung" / "metrics.jsonl"
    hook = DEADLOCK.format(trained=str(trained), taken=str(tmp_path / "taken"))
    (tmp_path / "hook" / "sitecustomize.py").write_text(hook)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hook"))
    hung = run_job(manifest, tmp_path / "hung", settings=settings)
    assert (tmp_path / "taken").exists(), "nothing hung"
    logs = "".join(path.read_text() for path in (tmp_path / "hung" / "logs").glob("training-*.log"))
    assert re.search(r"exit 75: waited \d+ s for training-\d to train on iteration \d", logs), logs[-3000:]
    assert f"spec.runPolicy.hangTimeoutSeconds allows {LIMIT_SECONDS} s, as ranks always progressed much faster" in logs
    assert "threading.Event().wait()" in logs, "the line that it hangs in"
    (hangs,) = {Path(name).stem for name in _logs_with(tmp_path / "hung" / "logs", "threading.Event().wait()")}
    assert f"of its ranks {hangs} waits for none of the others" in logs, logs[-3000:]
    assert_same_weights(hung, calm)
