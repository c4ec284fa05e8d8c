"""Errors of samples that cannot continue.

Rule: an error with a sample's key concerns that sample; one without a key concerns the weights.
"""

from rlhf_common.samples import SampleKey
from rlhf_workers.generation.engine import EngineError
from rlhf_workers.generation.requests import sample_name


def not_finite(key: SampleKey, version: int) -> EngineError:
    """Return the error for weights whose logits are not finite: such a policy must yield no tokens."""
    message = (
        f"{sample_name(key)}: weight version {version} of the actor gives logits that are not finite; lower "
        "spec.training.optimizer.learningRate or go back to an earlier checkpoint"
    )
    return EngineError("NotFinite", message, "spec.training.optimizer.learningRate")


def ended_early(key: SampleKey, tokens: int, why: str) -> EngineError:
    """Return the error of a sample that vLLM ended after so many response tokens before it was complete."""
    message = f"{sample_name(key)}: vLLM ended it after {tokens} response tokens: {why}"
    return EngineError("CoreEndedSample", message, key=key)
