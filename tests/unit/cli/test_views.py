"""Output for a running job, on a terminal and in a log."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rlhf_cli.console import duration, size
from rlhf_cli.live_view import BLOCKS, render, sparkline
from rlhf_cli.run_progress import MetricsTail, fresh_warnings, iteration_line, summary_line
from rlhf_common import control_pb2 as pb
from rlhf_coordinator.reports.trackers.metrics_jsonl import MetricsJsonl

STATUS = pb.JobStatus(
    job="arithmetic",
    phase="Generating",
    iteration=36,
    iterations=100,
    ledger={"queued": 3, "decoding": 29, "generated": 51, "scored": 45, "trained": 0},
    workers=[
        pb.WorkerStatus(
            worker="generation-0",
            state="Busy",
            activity="decode 12",
            tokens_per_second=620,
            versions={"actor": 36},
            busy_share=0.83,
        ),
        pb.WorkerStatus(worker="inference-0", state="Lost"),
    ],
    seconds_left=133,
    waiting_for=["inference-0 to come back (4 s)", "a", "b", "c"],
    restarts={"inference-0": 2},
    tokens=1234,
    last_checkpoint="/run/checkpoints/iteration-000030",
)


def shown(status: pb.JobStatus, notices: list[str]) -> str:
    console = Console(width=120, force_terminal=False)
    lines = [{"iteration": i, "reward": i / 10, "kl": 0.01, "samples_per_second": 24.0} for i in range(5)]
    with console.capture() as capture:
        console.print(render(status, lines, notices))
    return capture.get()


def test_the_live_view_shows_the_warnings_of_the_start() -> None:
    status = pb.JobStatus()
    status.CopyFrom(STATUS)
    status.warnings.append("p.jsonl line 3 holds <|im_start|>")
    assert "warning: p.jsonl line 3 holds <|im_start|>" in shown(status, [])


def test_plain_output_says_each_warning_of_the_start_once() -> None:
    shown_before: set[str] = set()
    status = pb.JobStatus(warnings=["a", "b", "a"])
    assert fresh_warnings(status, shown_before) == ["a", "b"]
    status.warnings.append("c")
    assert fresh_warnings(status, shown_before) == ["c"]
    assert fresh_warnings(status, shown_before) == []


def test_the_live_view_says_where_the_tail_is() -> None:
    status = pb.JobStatus()
    status.CopyFrom(STATUS)
    status.replicas["generation"] = 4
    status.fusion.CopyFrom(pb.FusionStatus(threshold=12, pool=1, predicted_seconds=2.0, predicted_off_seconds=2.6))
    assert "tail consolidates at 12 left on 1/4 workers, predicted 1.30x" in shown(status, [])
    status.pool.append("generation-0")
    status.fusion.released.extend(f"generation-{index}" for index in (1, 2, 3))
    status.fusion.migrated = 9
    text = shown(status, [])
    assert "tail 32 left, pool 1/4, 3 workers score, 9 samples moved" in text
    assert "generation-0 (pool)" in text
    assert "tail" not in shown(STATUS, [])


def test_the_live_view_says_what_drafts_do() -> None:
    status = pb.JobStatus()
    status.CopyFrom(STATUS)
    status.speculation.summary = "Disabled"
    assert "drafts" not in shown(status, [])
    status.speculation.CopyFrom(
        pb.SpeculationStatus(
            summary="Auto: 2.10 tokens per step", tokens_per_step=2.1, switches=["it is on", "it is off"]
        )
    )
    text = shown(status, [])
    assert "drafts Auto: 2.10 tokens per step" in text
    assert "it is on" in text
    assert "it is off" not in text, "the newest says how it is"


def test_the_live_view_says_why_there_are_long_rounds() -> None:
    reason = "long rounds with 6 surplus prompts: simulated to train 17.9 samples/s (1.66x)"
    assert reason in " ".join(shown(pb.JobStatus(job="j", long_rounds=reason), []).split())
    assert "rounds" not in shown(pb.JobStatus(job="j"), [])


def test_the_live_view_says_what_the_job_does_and_waits_for() -> None:
    text = shown(STATUS, ["12:00:00 inference-0: ended with exit code 1"])
    for expected in (
        "36 of 100 iterations",
        "Generating",
        "2m 13s left",
        "96/128 samples",
        "45/128 samples",
        "1,234 tokens",
        "decoding 29",
        "0.400",
        "decode 12",
        "83%",
        "v36",
        "Lost",
        "waiting for inference-0 to come back (4 s), a, b and 1 more",
        "checkpoint iteration-000030",
        "ended with exit code 1",
    ):
        assert expected in text


def test_an_empty_status_and_a_failed_one_can_be_shown() -> None:
    assert "Starting" in shown(pb.JobStatus(job="new", phase="Starting", iterations=5), [])
    failed = pb.JobStatus(job="j", phase="Failed", failure=pb.Failure(reason="RewardRaised", message="boom"))
    assert "RewardRaised: boom" in shown(failed, [])


@given(st.lists(st.floats(-1e6, 1e6), max_size=200))
def test_a_sparkline_keeps_order_and_width(values: list[float]) -> None:
    line = sparkline(values, 20)
    assert len(line) == min(20, len(values))
    assert set(line) <= set(BLOCKS)
    if 1 < len(values) <= 20 and max(values) > min(values):
        assert line[values.index(max(values))] == BLOCKS[-1]
        assert line[values.index(min(values))] == BLOCKS[0]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.6, "1m 00s"), (187, "3m 07s"), (5 * 3600 + 720, "5h 12m"), (183600, "2d 03h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(512, "512 B"), (3.4 * 2**20, "3.4 MiB"), (17 * 2**30, "17 GiB"), (2**41, "2048 GiB")]
)
def test_sizes(count: float, text: str) -> None:
    assert size(count) == text


def test_plain_lines() -> None:
    line = {
        "iteration": 2,
        "reward": 0.4123,
        "kl": 3.0127,
        "kl_per_token": 0.01034,
        "samples_per_second": 24.1,
        "tokens_per_second": 4100.0,
    }
    assert iteration_line(line, 100, 130) == (
        "iteration 2 (3 of 100)  reward 0.412  kl 3.013  kl/token 0.0103  24.1 samples/s  4,100 tokens/s  2m 10s left"
    )
    ended = {"iteration": 3, "time_ns": 1, "evaluation/version": 3.0, "evaluation/reward": 0.5}
    assert iteration_line(ended, 3, 0) == "evaluation of weight version 3  reward 0.500"
    assert iteration_line({"iteration": 0, "reward": None}, 1, 0) == "iteration 0 (1 of 1)"
    metrics = {"iteration": 0, "loss": 0.69314, "samples_per_second": 24.1}
    assert iteration_line(metrics, 3, 0) == "iteration 0 (1 of 3)  loss 0.6931  24.1 samples/s"
    rounds = {"iteration": 1, "rollout/long_round": 1.0, "prompts/waiting": 2.0}
    assert iteration_line(rounds, 3, 0) == "iteration 1 (2 of 3)  long round, 2 prompts wait"
    assert iteration_line(rounds | {"rollout/long_round": 0.0}, 3, 0).endswith("short round, 2 prompts wait")
    none = {"iteration": 1, "rollout/long_round": 0.0, "prompts/waiting": 0.0, "rollout/surplus_prompts": 0.0}
    assert iteration_line(none, 3, 0) == "iteration 1 (2 of 3)"
    batch = {"iteration": 1, "rollout/sorted_batch": 1.0, "rollout/expected_tokens_mean": 41.6}
    assert iteration_line(batch, 3, 0) == "iteration 1 (2 of 3)  sorted batch, 42 tokens a response expected"
    assert iteration_line(batch | {"rollout/sorted_batch": 0.0}, 3, 0) == "iteration 1 (2 of 3)"
    summary = {"phase": "Complete", "iterations": 60, "seconds": 182, "reward_first": 0.12, "reward_last": 0.88}
    assert summary_line(summary) == "Complete: 60 iterations in 3m 02s, reward 0.120 -> 0.880 (first, last tenth)"
    assert summary_line(summary | {"nonfinite_steps": 2}).endswith("2 optimizer steps skipped (not finite)")


def test_the_metrics_tail_hands_on_every_iteration_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read() == []
    file = MetricsJsonl(path.parent, 0)
    file.iteration(0, 1, {"reward": 0.0})
    file.iteration(1, 1, {"reward": 0.1})
    with path.open("a") as torn:
        torn.write('{"iteration": 2, "re')
    assert [line["iteration"] for line in tail.read()] == [0, 1]
    assert tail.read() == []
    restarted = MetricsJsonl(path.parent, 1)
    restarted.iteration(1, 2, {"reward": 0.1})
    restarted.iteration(2, 2, {"reward": 0.2})
    assert [line["iteration"] for line in tail.read()] == [2]
    assert [line["iteration"] for line in tail.lines] == [0, 1, 2]
