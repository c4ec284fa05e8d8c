"""The RLHFJob manifest as pydantic models, one file a part of the spec."""

from rlhf_api.job.spec import RLHFJob, RLHFJobSpec

__all__ = ["RLHFJob", "RLHFJobSpec"]
