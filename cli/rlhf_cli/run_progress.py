"""The progress of a run: metrics as they are written, the coordinator's status, and both as plain lines of text.

A restarted coordinator may replace the metrics file, and the file may end in half a line; an iteration is returned at
most once.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

import grpc

from rlhf_cli.console import duration
from rlhf_common import channels, control_pb2_grpc
from rlhf_common import control_pb2 as pb
from rlhf_coordinator.reports.trackers.metrics_jsonl import is_evaluation

MetricsLine = dict[str, Any]
"""Metrics of an iteration or an evaluation: one line of metrics.jsonl."""
REDIAL_SECONDS: Final = 0.5
"""Seconds between attempts to reach a coordinator that starts or restarts."""


class MetricsTail:
    """Reads metrics.jsonl as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0
        self.lines: list[MetricsLine] = []
        """All lines read so far, one per iteration, in order."""

    def read(self) -> list[MetricsLine]:
        """Return the lines of iterations that were not returned before."""
        try:
            with self._path.open("rb") as file:
                if (inode := self._path.stat().st_ino) != self._inode:
                    self._inode, self._offset = inode, 0
                file.seek(self._offset)
                content = file.read()
        except OSError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        fresh = []
        for text in whole.splitlines():
            line = json.loads(text)
            if not self.lines or line["iteration"] > self.lines[-1]["iteration"]:
                self.lines.append(line)
                fresh.append(line)
        return fresh


async def watch_status(address: str, certificates: Path, max_rate_hz: float) -> AsyncIterator[pb.JobStatus]:
    """Yield the coordinator's statuses, at most `max_rate_hz` per second; reconnect whenever the stream breaks."""
    while True:
        async with channels.aio_channel(address, certificates) as channel:
            stub = control_pb2_grpc.CoordinatorStub(channel)
            try:
                async for status in stub.WatchStatus(pb.WatchStatusRequest(max_rate_hz=max_rate_hz)):
                    yield status
            except grpc.aio.AioRpcError:
                pass
        await asyncio.sleep(REDIAL_SECONDS)


def fresh_warnings(status: pb.JobStatus, shown: set[str]) -> list[str]:
    """Return the warnings that were not shown yet, and add them to `shown`."""
    fresh = [warning for warning in dict.fromkeys(status.warnings) if warning not in shown]
    shown.update(fresh)
    return fresh


def iteration_line(line: Mapping[str, Any], iterations: int, seconds_left: float) -> str:
    """Return a line such as `iteration 2 (3 of 100)  reward 0.412  kl 3.013  24.1 samples/s  2m 10s left`.

    For a line that contains only an evaluation, return its version and reward.
    """
    if is_evaluation(line):
        reward = line.get("evaluation/reward")
        shown = "no reward" if reward is None else f"reward {reward:.3f}"
        return f"evaluation of weight version {line['iteration']}  {shown}"
    parts = [f"iteration {line['iteration']} ({line['iteration'] + 1} of {iterations})"]
    for name, label, digits in (
        ("reward", "reward", 3),
        ("kl", "kl", 3),
        ("kl_per_token", "kl/token", 4),
        ("loss", "loss", 4),
    ):
        if (value := line.get(name)) is not None:
            parts.append(f"{label} {value:.{digits}f}")
    for name, label in (("samples_per_second", "samples/s"), ("tokens_per_second", "tokens/s")):
        if (value := line.get(name)) is not None:
            parts.append(f"{value:.1f} {label}" if value < 100 else f"{value:,.0f} {label}")
    waiting = line.get("prompts/waiting")
    if waiting is not None and line.get("rollout/surplus_prompts", 1):
        kind = "long round" if line.get("rollout/long_round") else "short round"
        parts.append(f"{kind}, {waiting:.0f} prompts wait")
    if line.get("rollout/sorted_batch"):
        expected = line.get("rollout/expected_tokens_mean", 0.0)
        parts.append(f"sorted batch, {expected:.0f} tokens a response expected")
    if seconds_left > 0:
        parts.append(f"{duration(seconds_left)} left")
    return "  ".join(parts)


def summary_line(summary: Mapping[str, Any]) -> str:
    """Return the summary of a run as a line, such as `Complete: 60 iterations in 3m 02s, reward 0.120 -> 0.880 (first,
    last tenth), 42.0 samples/s`.
    """
    parts = [f"{summary.get('iterations', 0)} iterations"]
    if (seconds := summary.get("seconds")) is not None:
        parts[0] += f" in {duration(seconds)}"
    first, last = summary.get("reward_first"), summary.get("reward_last")
    if first is not None and last is not None:
        parts.append(f"reward {first:.3f} -> {last:.3f} (first, last tenth)")
    if (loss := summary.get("loss")) is not None:
        parts.append(f"loss {loss:.4f} in the last iteration")
    if (speed := summary.get("samples_per_second")) is not None:
        parts.append(f"{speed:.1f} samples/s")
    if skipped := summary.get("nonfinite_steps"):
        parts.append(f"{skipped} optimizer step{'s' * (skipped > 1)} skipped (not finite)")
    return f"{summary.get('phase', 'Ended')}: {', '.join(parts)}"
