"""The type of matrix products of a job: one for generation, scoring and training.

Rule: it follows from the manifest alone, never from the device a role happens to run on, or two roles would compute the
same log-probability in two types, and the ratio and the KL term would subtract numbers of two kinds.
"""

from typing import Final

import torch

from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.groups import ComputeType

DTYPES: Final[dict[ComputeType, torch.dtype]] = {"Float32": torch.float32, "BFloat16": torch.bfloat16}


def compute_dtype(spec: RLHFJobSpec) -> torch.dtype:
    """Return the type that `spec.training.precision` names, for every role of the job."""
    return DTYPES[spec.compute_type]
