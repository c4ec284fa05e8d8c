"""Correction of the mismatch between the engine that sampled and the ranks that train: its fields and rules.

Both compute log-probabilities of the same tokens under the same weights, by other kernels or in another precision.
What follows from the fields is `rlhf_workers.losses.mismatch`.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Final, Literal, NamedTuple, Self

from pydantic import Field

from rlhf_api.api_model import LARGEST, ApiModel
from rlhf_api.rules.rule import Rule, Values

Mode = Literal["Disabled", "Truncate", "Mask", "GeometricMask", "SequenceMask"]
Bound = Annotated[float, Field(ge=0, le=LARGEST)]


class Limits(NamedTuple):
    """Between which ratios of probabilities nothing is corrected."""

    low: float
    high: float


LIMITS: Final[Mapping[Mode, Limits]] = MappingProxyType(
    {
        "Truncate": Limits(0.0, 2.0),
        "Mask": Limits(0.5, 5.0),
        "GeometricMask": Limits(0.999, 1.002),
        "SequenceMask": Limits(0.0, 3.0),
    }
)
"""Of each source: truncated importance sampling (slime), IcePop, the geometric sequence mask of verl, TRL."""


class MismatchCorrection(ApiModel):
    """What a token counts in the policy loss by how much likelier it is to the trainer than it was to the engine."""

    mode: Mode = "Disabled"
    """Disabled counts every token alike. Truncate weighs it by the ratio of both probabilities, limited to low and
    high; Mask by it, or 0 outside of them. GeometricMask leaves out responses whose
    geometric mean of ratios is outside; SequenceMask weighs by the product of a response's ratios, or 0 outside. Needs
    oldLogProbabilities Trainer."""
    low: Bound | None = None
    """Least ratio; unset is what the mode's source has: 0, with Mask 0.5, with GeometricMask 0.999."""
    high: Bound | None = None
    """Largest ratio; unset is what the mode's source has: 2, with Mask 5, with GeometricMask 1.002, with SequenceMask
    3."""

    @property
    def limits(self) -> Limits:
        """The limits in force; of Disabled none, LookupError."""
        low, high = LIMITS[self.mode]
        return Limits(low if self.low is None else self.low, high if self.high is None else self.high)

    def resolved(self) -> Self:
        """Return it with its limits explicit."""
        return self if self.mode == "Disabled" else self.model_copy(update=self.limits._asdict())


def rules(path: str) -> Iterator[Rule]:
    """Yield what the fields of an algorithm ask of each other; `path` is the algorithm's, such as
    `spec.algorithm.ppo`."""
    field, old = f"{path}.mismatchCorrection", f"{path}.oldLogProbabilities"

    def made(values: Values) -> bool:
        mode: Mode = values[f"{field}.mode"]
        return mode == "Disabled" or values[old] == "Trainer"

    def ordered(values: Values) -> bool:
        if values[f"{field}.mode"] == "Disabled":
            return True
        low, high = LIMITS[values[f"{field}.mode"]]
        least: float = values[f"{field}.low"] if values.has(f"{field}.low") else low
        most: float = values[f"{field}.high"] if values.has(f"{field}.high") else high
        return least < most

    yield Rule(
        field=f"{field}.mode",
        node=path,
        cel="self.mismatchCorrection.mode == 'Disabled' || self.oldLogProbabilities == 'Trainer'",
        holds=made,
        message=f"needs {old}: Trainer, or there is no second probability to compare: set that, or use Disabled",
    )
    yield Rule(
        field=f"{field}.low",
        node=field,
        cel=f"self.mode == 'Disabled' || {_bound('low')} < {_bound('high')}",
        holds=ordered,
        message=f"must be below {field}.high, also where one of them is the mode's own: lower it, or raise that",
    )


def _bound(name: str) -> str:
    """Return the CEL of a bound in force, of a mode that is not Disabled."""
    own = ", ".join(f"'{mode}': {getattr(limits, name)}" for mode, limits in LIMITS.items())
    return f"(has(self.{name}) ? self.{name} : {{{own}}}[self.mode])"
