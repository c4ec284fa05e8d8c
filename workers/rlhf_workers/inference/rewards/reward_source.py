"""The contract of reward sources that are awaited for each sample, such as functions and endpoints; their failures.

Rule: a reward is a finite number, or None (abstained), or a RewardError. Never a zero for a failure.
"""

import math
from typing import Any, Protocol, runtime_checkable

from rlhf_api.names import ExitCode
from rlhf_api.samples import ScoringSample
from rlhf_workers.failures import WorkError

FUNCTION_FIELD = "spec.models.reward.function"
ENDPOINT_FIELD = "spec.models.reward.endpoint.url"
HEADERS_FIELD = "spec.models.reward.endpoint.headers"
TIMEOUT_FIELD = "spec.models.reward.timeoutSeconds"


class RewardError(WorkError):
    """One try of one sample failed; another may succeed. When it is not retried the job ends with USER_CODE."""

    def __init__(self, reason: str, message: str, field: str, *, retryable: bool = True) -> None:
        super().__init__(reason, message, field=field, retryable=retryable, exit_code=ExitCode.USER_CODE)


@runtime_checkable
class RewardSource(Protocol):
    """A reward function or endpoint; all methods run on one event loop."""

    async def start(self) -> None:
        """Ready to score; WorkError when it never can be."""

    async def score(self, sample: ScoringSample) -> float | None:
        """The reward, or None when it abstains; RewardError otherwise."""

    async def close(self) -> None:
        """Ends children and connections."""


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
