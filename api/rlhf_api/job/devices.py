"""`spec.devices`: the number of devices that a job divides among its groups, and the sizes that stay as written."""

from typing import Annotated, Final, Literal, get_args

from pydantic import Field

from rlhf_api.api_model import ApiModel

SizeGroup = Literal["Placement", "Generation", "Inference", "Training"]
"""Sizes that are chosen or fixed together."""
ReplanMode = Literal["Disabled", "Report", "Auto"]
"""Reaction to predictions that no longer fit."""
SIZE_GROUPS: Final[tuple[SizeGroup, ...]] = get_args(SizeGroup)


class Devices(ApiModel):
    """Devices for which sizes are chosen at the job's start."""

    count: Annotated[int, Field(ge=1, le=4096)]
    """Number of GPUs, or of worker processes in a job without GPUs."""
    memory: Annotated[float, Field(gt=0, le=4096)] | None = None
    """Memory of each device in GiB. Unset: no limit."""
    fixed: Annotated[list[SizeGroup], Field(max_length=4)] = Field(default_factory=list)
    """Groups whose sizes stay as in the manifest."""

    replan: ReplanMode = "Report"
    """Reaction to wrong predictions: Report reports them, Auto also changes the plan at a checkpoint (`rlhf run`)."""

    @property
    def chosen(self) -> frozenset[SizeGroup]:
        """Return the sizes that are chosen; empty once a plan has set them."""
        return frozenset(SIZE_GROUPS) - frozenset(self.fixed)
