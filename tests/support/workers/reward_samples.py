"""Samples as a reward function receives them."""

import numpy as np

from rlhf_common.samples import Episode, SampleKey, ScoringSample


def sample(response: str, prompt: str = "p") -> ScoringSample:
    """Return a sample of one token with these texts, whose record has a bonus of 0.5.

    Its environment returned the same bonus, None for the response "none", and no value for the response "fault".
    """
    token = np.ones(1, np.int32)
    episode = None if response == "fault" else Episode(2, None if response == "none" else 0.5, {"calls": 1.0})
    return ScoringSample(SampleKey(0, 0, 0), token, token, prompt, response, '{"bonus": 0.5}', episode=episode)
