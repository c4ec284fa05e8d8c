"""What is said of a sample that cannot go on.

Rule: an error that bears the sample's key is of that sample alone, and the engine goes on without it; one that does not
is of the weights.
"""

from rlhf_common.samples import SampleKey
from rlhf_workers.generation.engine import EngineError
from rlhf_workers.generation.requests import sample_name


def not_finite(key: SampleKey, version: int) -> EngineError:
    """Return the error of weights by which a sample has no probabilities: a policy of them must not yield tokens."""
    message = (
        f"{sample_name(key)}: weight version {version} of the actor gives logits that are not finite; lower "
        "spec.training.optimizer.learningRate or go back to an earlier checkpoint"
    )
    return EngineError("NotFinite", message, "spec.training.optimizer.learningRate")


def ended_early(key: SampleKey, tokens: int, why: str) -> EngineError:
    """Return the error of a sample that vLLM ended after so many response tokens, though it was not complete."""
    message = f"{sample_name(key)}: vLLM ended it after {tokens} response tokens: {why}"
    return EngineError("CoreEndedSample", message, key=key)
