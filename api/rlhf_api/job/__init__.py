"""The RLHFJob manifest as pydantic models, with one file per block of the spec."""

from rlhf_api.job.spec import RLHFJob, RLHFJobSpec

__all__ = ["RLHFJob", "RLHFJobSpec"]
