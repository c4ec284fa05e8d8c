"""What every algorithm has in the manifest, and the questions that the rest of the project asks of one.

An algorithm is a subclass of `AlgorithmFields` in a module of its own, entered in `registry`. A question without a
sensible answer for all has no default: an algorithm that forgets one cannot be made.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from pydantic import Field

from rlhf_api.algorithms.graph import SCORE_REFERENCE, Task
from rlhf_api.api_model import LARGEST, ApiModel
from rlhf_api.rules.rule import Rule

Positive = Annotated[float, Field(gt=0, le=LARGEST)]
NonNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Epochs = Annotated[int, Field(ge=1, le=64)]
MiniBatchSize = Annotated[int, Field(ge=1, le=1048576)]


class AlgorithmFields(ApiModel):
    """One algorithm: its numbers, and what follows from them."""

    summary: ClassVar[str]
    """One sentence for the manifest's reference."""
    all_tasks: ClassVar[tuple[Task, ...]]
    """Every task it may have, whatever its numbers are, in the order of the stages."""

    if TYPE_CHECKING:  # fields of every algorithm, which stand where each declares them in its manifest
        epochs: int
        mini_batch_size: int

    @property
    @abstractmethod
    def responses_per_prompt(self) -> int:
        """Responses that are sampled for one prompt."""

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks it has with these numbers."""
        return self.all_tasks

    @property
    def files(self) -> Mapping[str, str]:
        """Files of the user that workers open: the field that names one, below the algorithm's own -> its path."""
        return {}

    @classmethod
    def rules(cls, path: str) -> Iterator[Rule]:
        """Yield the rules that only this algorithm has; `path` is that of its fields, such as `spec.algorithm.ppo`."""
        yield from ()

    def resolved(self, absolute: Callable[[str], str]) -> Self:
        """Return it with everything explicit; `absolute` makes a path of the manifest absolute."""
        return self


class PolicyGradientFields(AlgorithmFields):
    """Fields of the clipped policy-gradient algorithms. Without a KL term nobody needs the reference model."""

    kl_coefficient: NonNegative = 0.02
    """Weight of the KL divergence to the reference model; 0 trains without a reference."""
    clip_range: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio of new to old probability is clipped to [1 - clipRange, 1 + clipRangeHigh]."""
    clip_range_high: Positive | None = None
    """Upper clip range; clipRange when unset."""
    dual_clip: Annotated[float, Field(gt=1, le=LARGEST)] | None = None
    """Where the advantage is negative, the loss grows no further from this ratio on; 3 is usual, unset is off."""
    entropy_coefficient: NonNegative = 0.0
    """Weight of the entropy bonus in the policy loss."""
    epochs: Epochs = 1
    """Passes over the samples of an iteration."""
    mini_batch_size: MiniBatchSize = 64
    """Samples per optimizer step; must divide rollout.batchSize."""

    @property
    def tasks(self) -> tuple[Task, ...]:
        return tuple(task for task in self.all_tasks if self.kl_coefficient or task is not SCORE_REFERENCE)

    def resolved(self, absolute: Callable[[str], str]) -> Self:
        if self.clip_range_high is not None:
            return self
        return self.model_copy(update={"clip_range_high": self.clip_range})
