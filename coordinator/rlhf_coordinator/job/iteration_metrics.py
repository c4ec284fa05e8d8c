"""What an iteration took and made: seconds by phase, tokens, rewards, counts; the numbers that reports and status show.

Rule: the times come in; nothing here changes what the job does. Every sum is in sample order.
`control` is the time between the message that ended a phase and the commands that begin the next one: what the
coordinator itself adds to an iteration's critical path.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from rlhf_api import control_pb2 as pb
from rlhf_api.algorithms import Graph
from rlhf_coordinator.state.ledger import Ledger

PHASE_METRICS: Final = {
    "Generating": "seconds/generation",
    "Scoring": "seconds/inference",
    "Training": "seconds/training",
    "Publishing": "seconds/publish",
    "Checkpointing": "seconds/checkpoint",
    "Recovering": "seconds/recovery",
}


@dataclass
class IterationMetrics:
    """Of the iteration in progress; times are seconds of one monotonic clock."""

    begun: float
    phase: str = "Starting"
    phase_begun: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    control: dict[str, float] = field(default_factory=dict)
    """By the phase that ended."""
    turns: dict[str, float] = field(default_factory=dict)
    """Worker -> seconds in which its device changed hands between training and the other roles."""

    def enter(self, phase: str, now: float) -> float:
        """Another phase begins; returns the seconds of the one before."""
        spent = now - self.phase_begun
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + spent
        self.phase, self.phase_begun = phase, now
        return spent

    def begin(self, now: float) -> None:
        """The next iteration begins."""
        self.enter(self.phase, now)
        self.begun, self.seconds, self.control, self.turns = now, {}, {}, {}

    def observe(self, worker: str, observation: pb.Observation) -> None:
        """Take in that a worker's device changed hands: a role went to host memory or came back."""
        if observation.WhichOneof("work") in ("offload", "onload"):
            seconds = (observation.end_ns - observation.start_ns) / 1e9
            self.turns[worker] = self.turns.get(worker, 0.0) + seconds

    def metrics(self, graph: Graph, ledger: Ledger, training: Mapping[str, float], now: float) -> dict[str, float]:
        """Everything worth keeping of a finished iteration. A reward that nobody gave is absent, never zero."""
        self.enter(self.phase, now)
        seconds = max(1e-9, now - self.begun)
        result = {
            **batch_metrics(ledger, graph),
            "samples_per_second": len(ledger.samples) / seconds,
            "tokens_per_second": ledger.tokens / seconds,
            "seconds/iteration": seconds,
            "control_share": sum(self.control.values()) / seconds,
            "samples/returned": float(ledger.returned),
            "samples/migrated": float(ledger.migrated),
            "samples/retried": float(ledger.retried),
        }
        for phase, name in PHASE_METRICS.items():
            result[name] = self.seconds.get(phase, 0.0)
        result["seconds/generation_and_inference"] = result["seconds/generation"] + result["seconds/inference"]
        if self.turns:
            result["seconds/turns"] = max(self.turns.values())
        if (skipped := training.get("train/nonfinite_steps_total")) is not None:
            result["nonfinite_steps"] = skipped
        result.update({f"training/{name}": value for name, value in training.items()})
        return {name: value for name, value in result.items() if math.isfinite(value)}


def skipped_steps(training: Mapping[str, float], iteration: int) -> str:
    """What is said of an iteration whose training left out steps; empty when it left out none."""
    count = round(training.get("train/nonfinite_steps", 0.0))
    if not count:
        return ""
    steps = "1 optimizer step was" if count == 1 else f"{count} optimizer steps were"
    total = round(training.get("train/nonfinite_steps_total", count))
    return (
        f"iteration {iteration + 1}: {steps} skipped, because a loss or gradient was infinite or NaN; {total} so far "
        "in this job"
    )


def batch_metrics(ledger: Ledger, graph: Graph) -> dict[str, float]:
    """Mean reward and its deviation over the samples that have one; mean length; divergence from the reference."""
    field = graph.reward_fields[0]
    rewards = np.array([_one(sample.fields[field]) for sample in ledger.samples if field in sample.fields])
    lengths = np.array([len(sample.response) for sample in ledger.samples], dtype=np.float64)
    result = {
        "response_tokens_mean": float(lengths.mean()),
        "response_tokens_max": float(lengths.max()),
        "tokens": float(lengths.sum()),
        "samples/abstained": float(sum(sample.abstained for sample in ledger.samples)),
        "samples/truncated": float(sum(sample.finish_reason == "length" for sample in ledger.samples)),
    }
    if rewards.size:
        result |= {"reward": float(rewards.mean()), "reward_std": float(rewards.std())}
    return result | divergence(ledger, graph)


def divergence(ledger: Ledger, graph: Graph) -> dict[str, float]:
    """`kl`: log p - log q summed over a response, mean over responses, in nats: what klTarget is compared with;
    `kl_per_token`: mean over their tokens. Over what is trained on: an abstained sample has none; empty without any."""
    pairs = [
        (sample.response.log_probabilities, sample.fields[field])
        for field in graph.compared_fields[:1]
        for sample in ledger.samples
        if field in sample.fields and not sample.abstained
    ]
    if not pairs:
        return {}
    policy, reference = (np.frombuffer(b"".join(side), dtype="<f4") for side in zip(*pairs, strict=True))
    total = float((policy.astype(np.float64) - reference.astype(np.float64)).sum())
    return {"kl": total / len(pairs), "kl_per_token": total / len(policy)}


def _one(value: bytes) -> float:
    return float(np.frombuffer(value, dtype="<f4")[0])
