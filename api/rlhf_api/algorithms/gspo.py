"""Group sequence policy optimisation: fields and graph. Its losses are `rlhf_workers.algorithms.gspo`."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlhf_api.algorithms.fields import NonNegative, Positive
from rlhf_api.algorithms.grpo import GRPO


class GSPO(GRPO):
    """Group sequence policy optimisation: the ratio of new to old probability is the geometric mean over a response."""

    summary: ClassVar = "Group sequence policy optimisation, ratios of whole responses, no critic."

    kl_coefficient: NonNegative = 0.0
    """Weight of the KL divergence to the reference model; 0 trains without a reference."""
    clip_range: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    """The ratio of a response is clipped to [1 - clipRange, 1 + clipRangeHigh]; a response's mean ratio is near 1."""
    clip_range_high: Positive | None = 4e-4
    """Upper clip range; clipRange when null."""
    ratio_level: Literal["Token", "Sequence"] = "Sequence"
    """Gradient of the ratio: that of the whole response (Sequence) or of each token (Token, GSPO-token). They differ
    where advantages vary within a response."""
