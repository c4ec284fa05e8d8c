"""A real job with two rewards, one of them a judge that fails on some responses, killed and restarted."""

import json
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from tests.support.jobs.chaos import Kills, assert_same_weights, run_job
from tests.support.jobs.local_job import edited_spec, write_job
from tests.support.workers.answering_server import answering

from rlhf_coordinator.reports.sample_table import read_table, table_files

pytestmark = pytest.mark.full

REWARD = '''
def score(prompts, responses, records, finish_reason):
    """Share of digits, less the mean of its group."""
    shares = [sum(letter.isdigit() for letter in text) / max(1, len(text)) for text in responses]
    mean = sum(shares) / len(shares)
    ends = [float(reason == "stop") for reason in finish_reason]
    return [{"reward": share - mean, "metrics": {"ended": end}} for share, end in zip(shares, ends)]
'''


def failing_judge(request: dict[str, Any], _: Message) -> tuple[int, Any]:
    """Rate a response by its length, and fail on some; the answer depends on the text alone."""
    size = len(request["messages"][0]["content"])
    top = [{"token": str(1 + size % 9), "logprob": -0.1}]
    return 500 if size % 3 == 0 else 200, {"choices": [{"logprobs": {"content": [{"top_logprobs": top}]}}]}


@pytest.fixture
def judge() -> Iterator[str]:
    with answering(failing_judge) as address:
        yield f"{address}/v1/chat/completions"


@pytest.mark.timeout(1800)
def test_rewards_are_combined_alike_in_a_run_that_was_killed_and_a_judges_failure_is_no_number(
    tmp_path: Path, judge: str
) -> None:
    manifest = write_job(tmp_path, iterations=3, batch=8, every=1, algorithm="grpo")
    with edited_spec(manifest) as spec:
        del spec["models"]["reward"]
        failing = {"judge": {"endpoint": {"url": judge, "model": "judge"}}, "retries": 0, "onFailure": "Abstain"}
        spec["models"]["rewards"] = [
            {"name": "digits", "calls": "Group", "function": {"file": "reward.py"}},
            {"name": "judge", "weight": 0.5, **failing},
        ]
        spec["rewardShaping"] = {"combine": "NormalizedSum", "overlongBuffer": 8, "truncated": "Mask"}
    (tmp_path / "reward.py").write_text(REWARD)
    calm = run_job(manifest, tmp_path / "calm")
    kills = Kills(seed=1, count=2, among=("coordinator", "inference-0"), required=False)
    assert_same_weights(calm, run_job(manifest, tmp_path / "killed", kills=kills))
    lines = calm.lines
    for line in lines:
        assert line["rewards/digits/abstained"] == 0
        assert abs(line["rewards/digits/mean"]) < 1e-6
        assert 0 <= line["rewards/digits/metrics/ended"] <= 1
    assert sum(line["rewards/judge/abstained"] for line in lines) > 0
    assert all(line["rewards/judge/min"] >= -1 for line in lines if "rewards/judge/min" in line)
    rows = [row for path in table_files(tmp_path / "calm").values() for row in read_table(path)]
    assert all({"reward", "digits"} <= row.rewards.keys() for row in rows if row.reward is not None)
    shaped = [row for row in rows if row.shaped_reward is not None and row.reward is not None]
    assert any(row.shaped_reward != pytest.approx(row.reward) for row in shaped), "normalised, less the penalty"
    events = [json.loads(line) for line in calm.read("events.jsonl").splitlines()]
    assert {"score-abstained"} <= {event["kind"] for event in events}
