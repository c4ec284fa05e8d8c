"""The contract of reward sources that are awaited for each sample, such as functions and endpoints; their failures.

Rule: a reward is a finite number, or None (abstained), or a RewardError. Never a zero for a failure. What user code and
endpoints give is checked here, its metrics too.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

from rlhf_common import reward_metrics
from rlhf_common.samples import ScoringSample
from rlhf_workers.user_code.user_process import UserCodeError

RewardError: TypeAlias = UserCodeError
"""One try of one sample failed, whoever was to judge it: a function, an endpoint or a judge."""


@dataclass(frozen=True)
class Judgment:
    """What a source says of one response."""

    reward: float | None
    """None: it abstains."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers beside the reward, by name."""


@runtime_checkable
class RewardSource(Protocol):
    """A reward function or endpoint; all methods run on one event loop."""

    async def start(self) -> None:
        """Ready to score; WorkError when it never can be."""

    async def score(self, sample: ScoringSample) -> Judgment:
        """The reward of a response judged alone; RewardError when there is none."""

    async def close(self) -> None:
        """Ends children and connections."""


@runtime_checkable
class GroupRewardSource(RewardSource, Protocol):
    """A source that can also judge all responses to one prompt together."""

    async def score_group(self, samples: Sequence[ScoringSample]) -> Sequence[Judgment]:
        """The rewards of several responses by one call, in their order; RewardError when there are none."""


def described(sample: ScoringSample) -> dict[str, Any]:
    """Return a sample as functions and endpoints are given it."""
    return {
        "prompt": sample.prompt_text,
        "response": sample.response_text,
        "record": json.loads(sample.record or "{}"),
        "finish_reason": sample.finish_reason,
        "response_tokens": len(sample.response),
    }


def judgment(reward: Any, metrics: Any, path: str) -> Judgment:
    """A reward and its metrics, as they came as JSON; RewardError RewardInvalid, blaming the manifest's field `path`,
    says what is wrong with either."""
    if not isinstance(metrics, Mapping):
        raise RewardError("RewardInvalid", f"metrics are {type(metrics).__name__}; they must be an object", path)
    if problem := reward_metrics.problem(metrics):
        raise RewardError("RewardInvalid", problem, path)
    return Judgment(checked_reward(reward, path), {name: float(value) for name, value in metrics.items()})


def checked_reward(value: Any, field: str) -> float | None:
    """A reward that came as JSON; RewardError RewardInvalid says what came instead of a finite number or null."""
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    shown = repr(value)
    shown = shown if len(shown) <= 100 else shown[:100] + "..."
    message = f"the reward is {shown} ({type(value).__name__}); it must be a finite number, or None to abstain"
    raise RewardError("RewardInvalid", message, field)
