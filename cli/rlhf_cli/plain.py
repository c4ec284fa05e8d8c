"""One line an iteration, for logs and pipes. Pure: data in, text out."""

from collections.abc import Mapping
from typing import Any

from rlhf_cli.console import duration


def iteration_line(line: Mapping[str, Any], iterations: int, seconds_left: float) -> str:
    """`iteration 3/100  reward 0.412  kl 3.013  kl/token 0.2511  24.1 samples/s  410 tokens/s  2m 10s left`."""
    parts = [f"iteration {line['iteration'] + 1}/{iterations}"]
    for name, label, digits in (("reward", "reward", 3), ("kl", "kl", 3), ("kl_per_token", "kl/token", 4)):
        if (value := line.get(name)) is not None:
            parts.append(f"{label} {value:.{digits}f}")
    for name, label in (("samples_per_second", "samples/s"), ("tokens_per_second", "tokens/s")):
        if (value := line.get(name)) is not None:
            parts.append(f"{value:.1f} {label}" if value < 100 else f"{value:,.0f} {label}")
    if seconds_left > 0:
        parts.append(f"{duration(seconds_left)} left")
    return "  ".join(parts)


def summary_line(summary: Mapping[str, Any]) -> str:
    """`Complete: 60 iterations in 3m 02s, reward 0.120 -> 0.880 (first, last tenth), 42.0 samples/s`."""
    parts = [f"{summary.get('iterations', 0)} iterations"]
    if (seconds := summary.get("seconds")) is not None:
        parts[0] += f" in {duration(seconds)}"
    first, last = summary.get("reward_first"), summary.get("reward_last")
    if first is not None and last is not None:
        parts.append(f"reward {first:.3f} -> {last:.3f} (first, last tenth)")
    if (speed := summary.get("samples_per_second")) is not None:
        parts.append(f"{speed:.1f} samples/s")
    if skipped := summary.get("nonfinite_steps"):
        parts.append(f"{skipped} optimizer step{'s' * (skipped > 1)} skipped (not finite)")
    return f"{summary.get('phase', 'Ended')}: {', '.join(parts)}"
