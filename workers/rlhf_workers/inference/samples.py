"""What inference scores: one sample as plain arrays and texts, checked once when it arrives.

Rule: a malformed sample is refused before it reaches a model, naming the sample and what is wrong.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rlhf_api import control_pb2 as pb
from rlhf_api.arrays import unpack
from rlhf_workers.role import WorkError

Tokens = npt.NDArray[np.int32]
Scores = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Sample:
    """One prompt and its response."""

    key: pb.SampleKey
    prompt: Tokens
    """[p], p >= 1."""
    response: Tokens
    """[n], n >= 1."""
    prompt_text: str
    response_text: str
    record: str
    """The prompt's JSON object."""

    @property
    def tokens(self) -> Tokens:
        """Prompt and response."""
        return np.concatenate([self.prompt, self.response])

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt) + len(self.response)


def sample_of(message: pb.ScoreSample) -> Sample:
    """The sample of a Score command; WorkError SampleInvalid names what does not fit."""
    return Sample(
        key=message.key,
        prompt=tokens_of(message, "prompt"),
        response=tokens_of(message, "response"),
        prompt_text=message.prompt_text,
        response_text=message.response_text,
        record=message.record,
    )


def tokens_of(message: pb.ScoreSample | pb.PrefixSample, name: Literal["prompt", "response"]) -> Tokens:
    """int32 [n >= 1] of a sample's field; WorkError SampleInvalid names what does not fit."""
    try:
        array: npt.NDArray[Any] = unpack(getattr(message, name))
    except ValueError as error:
        raise _invalid(message, name, str(error)) from error
    if array.ndim != 1 or not len(array) or array.dtype != np.int32 or int(array.min()) < 0:
        raise _invalid(message, name, f"is {array.dtype} {list(array.shape)}, needs token ids, int32 [n >= 1]")
    return array


def _invalid(message: pb.ScoreSample | pb.PrefixSample, name: str, what: str) -> WorkError:
    key = message.key
    return WorkError("SampleInvalid", f"sample {key.sample} of iteration {key.iteration}: {name} {what}")
