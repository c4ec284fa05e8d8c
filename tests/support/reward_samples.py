"""Samples as a reward function is given them."""

import numpy as np

from rlhf_api.samples import SampleKey, ScoringSample


def sample(response: str, prompt: str = "p") -> ScoringSample:
    """Return a sample of one token with these texts, whose record has a bonus of a half."""
    token = np.ones(1, np.int32)
    return ScoringSample(SampleKey(0, 0, 0), token, token, prompt, response, '{"bonus": 0.5}')
