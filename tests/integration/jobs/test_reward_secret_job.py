"""A real job whose reward needs a secret: it receives it, and no file of the run has it, although it is printed."""

from pathlib import Path

import pytest
from tests.support.jobs.chaos import run_job
from tests.support.jobs.local_job import edited_spec, write_job

pytestmark = pytest.mark.full

SECRET = "sk-tell-nobody-1234"
REWARD = """
import os
import sys

def score(prompt, response, record):
    print("my token is", os.environ["JUDGE_TOKEN"], file=sys.stderr)
    if os.environ["JUDGE_TOKEN"] != "".join(["sk-tell", "-nobody-1234"]):
        raise ValueError("another token: " + os.environ["JUDGE_TOKEN"])
    return 0.25
"""


@pytest.mark.timeout(1800)
def test_a_secret_reaches_the_reward_and_no_file_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = write_job(tmp_path, iterations=1, batch=8, algorithm="grpo")
    with edited_spec(manifest) as spec:
        secret = {"name": "JUDGE_TOKEN", "secretKeyRef": {"name": "judge", "key": "token"}}
        spec["models"]["reward"]["function"]["env"] = [secret]
    (tmp_path / "reward.py").write_text(REWARD)
    monkeypatch.setenv("RLHF_SECRET_JUDGE_TOKEN", SECRET)
    run = run_job(manifest, tmp_path / "run")
    logs = "".join(file.read_text() for file in (tmp_path / "run" / "logs").iterdir())
    assert "my token is ***" in logs
    assert SECRET not in run.output
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert [str(file) for file in files if SECRET.encode() in file.read_bytes()] == []
