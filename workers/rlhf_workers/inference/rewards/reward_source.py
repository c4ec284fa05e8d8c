"""Interface of awaited reward sources, such as functions and endpoints, and their failures.

Rule: a reward is a finite number of float32, None (abstained), or a RewardError; never a zero for a failure.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import numpy as np

from rlhf_common import reward_metrics
from rlhf_common.json_numbers import finite_number
from rlhf_common.samples import ScoringSample
from rlhf_workers.user_code.user_process import UserCodeError

RewardError: TypeAlias = UserCodeError
"""One attempt to judge one or several samples failed, for any kind of awaited source."""


LARGEST: Final = float(np.finfo(np.float32).max)
"""Largest reward: scores travel as float32."""


@dataclass(frozen=True)
class Judgment:
    """A source's reward and metrics for one response."""

    reward: float | None
    """The reward; None: the source abstains."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Additional numbers, by name."""


@runtime_checkable
class RewardSource(Protocol):
    """A source of rewards; all methods run on one event loop."""

    async def start(self) -> None:
        """Prepare for scoring; WorkError if that can never succeed."""

    async def score(self, sample: ScoringSample) -> Judgment:
        """Return the reward of one response; RewardError if there is none."""

    async def close(self) -> None:
        """End child processes and connections."""


@runtime_checkable
class GroupRewardSource(RewardSource, Protocol):
    """A source that can also judge all responses to one prompt together."""

    async def score_group(self, samples: Sequence[ScoringSample]) -> Sequence[Judgment]:
        """Return the rewards of several responses from one call, in order; RewardError if there are none."""


def described(sample: ScoringSample) -> dict[str, Any]:
    """Return a sample in the form that functions and endpoints get."""
    return {
        "prompt": sample.prompt_text,
        "response": sample.response_text,
        "record": json.loads(sample.record or "{}"),
        "finish_reason": sample.finish_reason,
        "response_tokens": len(sample.response),
    }


def judgment(reward: Any, metrics: Any, path: str) -> Judgment:
    """Check a reward and its metrics from a function, an endpoint or an environment.

    Raises RewardError RewardInvalid, with the manifest's field `path`.
    """
    if not isinstance(metrics, Mapping):
        raise RewardError("RewardInvalid", f"metrics are {type(metrics).__name__}; they must be an object", path)
    if problem := reward_metrics.problem(metrics):
        raise RewardError("RewardInvalid", problem, path)
    return Judgment(checked_reward(reward, path), {name: float(value) for name, value in metrics.items()})


def checked_reward(value: Any, field: str) -> float | None:
    """Return a checked reward; RewardError RewardInvalid unless it is a finite number of float32 or None."""
    if value is None:
        return None
    if (number := finite_number(value)) is not None and abs(number) <= LARGEST:
        return number
    shown = repr(value)
    shown = shown if len(shown) <= 100 else shown[:100] + "..."
    message = (
        f"the reward is {shown} ({type(value).__name__}); it must be a finite number of float32, or None to abstain"
    )
    raise RewardError("RewardInvalid", message, field)
