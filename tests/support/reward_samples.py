"""Samples as a reward function is given them."""

import numpy as np
from rlhf_workers.inference.samples import Sample

from rlhf_api import control_pb2 as pb


def sample(response: str, prompt: str = "p") -> Sample:
    """Return a sample of one token with these texts, whose record has a bonus of a half."""
    token = np.ones(1, np.int32)
    return Sample(pb.SampleKey(), token, token, prompt, response, '{"bonus": 0.5}')
