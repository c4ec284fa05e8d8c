"""Correction of the mismatch between the log-probabilities of the sampling engine and the training ranks."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Final, Literal, NamedTuple, Self

from pydantic import Field

from rlhf_api.api_model import LARGEST, ApiModel
from rlhf_api.rules.rule import Rule, Values

Mode = Literal["Disabled", "Truncate", "Mask", "GeometricMask", "SequenceMask"]
Bound = Annotated[float, Field(ge=0, le=LARGEST)]


class Limits(NamedTuple):
    """Range of probability ratios that are neither truncated nor masked."""

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
"""Default limits from the sources: truncated importance sampling (slime), IcePop, the geometric sequence mask of verl,
TRL."""


class MismatchCorrection(ApiModel):
    """Weight of a token in the policy loss, from ratios of trainer and engine probabilities."""

    mode: Mode = "Disabled"
    """Disabled weights every token equally. Truncate uses the ratio, limited to low and high; Mask uses it, or 0
    outside of them. GeometricMask drops responses whose geometric mean of ratios is outside; SequenceMask uses the
    product of a response's ratios, or 0 outside. Needs oldLogProbabilities Trainer."""
    low: Bound | None = None
    """Least ratio. Unset: 0; with Mask 0.5; with GeometricMask 0.999."""
    high: Bound | None = None
    """Largest ratio. Unset: 2; with Mask 5; with GeometricMask 1.002; with SequenceMask 3."""

    @property
    def limits(self) -> Limits:
        """The limits in force. Raises LookupError if the mode is Disabled."""
        low, high = LIMITS[self.mode]
        return Limits(low if self.low is None else self.low, high if self.high is None else self.high)

    def resolved(self) -> Self:
        """Return it with explicit limits, unless the mode is Disabled."""
        return self if self.mode == "Disabled" else self.model_copy(update=self.limits._asdict())


def rules(path: str) -> Iterator[Rule]:
    """Yield the rules between fields of an algorithm; `path` is the algorithm's, such as `spec.algorithm.ppo`."""
    field, old = f"{path}.mismatchCorrection", f"{path}.oldLogProbabilities"

    def trainer_recomputes(values: Values) -> bool:
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
        holds=trainer_recomputes,
        message=f"needs {old}: Trainer, which computes the second probability: set it to Trainer, or use Disabled",
    )
    yield Rule(
        field=f"{field}.low",
        node=field,
        cel=f"self.mode == 'Disabled' || {_bound('low')} < {_bound('high')}",
        holds=ordered,
        message=f"must be below {field}.high, also with the mode's default: lower it, or raise {field}.high",
    )


def _bound(name: str) -> str:
    """Return the CEL of a bound in force, for a mode other than Disabled."""
    own = ", ".join(f"'{mode}': {getattr(limits, name)}" for mode, limits in LIMITS.items())
    return f"(has(self.{name}) ? self.{name} : {{{own}}}[self.mode])"
