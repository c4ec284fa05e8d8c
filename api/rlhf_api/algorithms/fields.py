"""What every algorithm has in the manifest, and the questions that the rest of the project asks of one.

An algorithm is a subclass of `AlgorithmFields` in a module of its own, entered in `registry`. A question without a
sensible answer for all has no default: an algorithm that forgets one cannot be made.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field

from rlhf_api.algorithms import mismatch
from rlhf_api.algorithms.graph import SCORE_REFERENCE, Task
from rlhf_api.algorithms.mismatch import MismatchCorrection
from rlhf_api.algorithms.refill import RefillRule
from rlhf_api.api_model import LARGEST, ApiModel
from rlhf_api.rules.rule import Rule

Positive = Annotated[float, Field(gt=0, le=LARGEST)]
NonNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Epochs = Annotated[int, Field(ge=1, le=64)]
MiniBatchSize = Annotated[int, Field(ge=1, le=1048576)]
KLEstimator = Literal["K1", "K2", "K3", "Unbiased"]
LossAggregation = Literal["SequenceMean", "TokenMean", "ConstantLength"]


class AlgorithmFields(ApiModel):
    """One algorithm: its numbers, and what follows from them."""

    summary: ClassVar[str]
    """One sentence for the manifest's reference."""
    all_tasks: ClassVar[tuple[Task, ...]]
    """Every task it may have, whatever its numbers are, in the order of the stages."""

    samples_per_unit: ClassVar[int] = 1
    """So many samples that follow one another are always in one micro-batch: those of a pair."""
    greedy_baseline: ClassVar[bool] = False
    """Whether one more response to each prompt, its last sample, is decoded greedily: its reward is what the others are
    held against, and it is not trained on."""

    if TYPE_CHECKING:  # fields of every algorithm, which stand where each declares them in its manifest
        epochs: int
        mini_batch_size: int

    @property
    @abstractmethod
    def responses_per_prompt(self) -> int:
        """Responses to one prompt that are trained on."""

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks it has with these numbers."""
        return self.all_tasks

    @property
    def response_keys(self) -> tuple[str, ...]:
        """Keys under which a line of the prompt file holds its responses, in the order of the samples of a group; empty
        for an algorithm whose graph generates them."""
        return ()

    @property
    def refill(self) -> RefillRule:
        """How groups that teach nothing are replaced; here they are not."""
        return RefillRule(0)

    @property
    def files(self) -> Mapping[str, str]:
        """Files of the user that workers open: the field that names one, below the algorithm's own -> its path."""
        return {}

    @property
    def recomputes_logprobs(self) -> bool:
        """Whether the training ranks compute the log-probabilities of the sampled tokens before they train on them."""
        return False

    @property
    def corrects_mismatch(self) -> bool:
        """Whether losses are weighed by how much likelier a token is by these than it was to who drew it."""
        return False

    def trains_policy(self, iteration: int) -> bool:
        """Whether an iteration (from 0) trains the policy, and not its critics alone."""
        return True

    @classmethod
    def shared_rules(cls, path: str) -> Iterator[Rule]:
        """Yield the rules of fields that it shares with others of its kind; `path` as for `rules`."""
        yield from ()

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
    kl_estimator: KLEstimator | None = None
    """How a token's divergence d = log p - log r from the reference is estimated: K1 is d, K2 is d^2 / 2, K3 is
    exp(-d) - 1 + d, Unbiased is K3 times the ratio of the policy to the one that sampled, for the loss only. K1 in
    rewards and K3 in the loss when unset."""
    clip_range: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio of new to old probability is clipped to [1 - clipRange, 1 + clipRangeHigh]."""
    clip_range_high: Positive | None = None
    """Upper clip range; clipRange when unset."""
    dual_clip: Annotated[float, Field(gt=1, le=LARGEST)] | None = None
    """Where the advantage is negative, the loss grows no further from this ratio on; 3 is usual, unset is off."""
    entropy_coefficient: NonNegative = 0.0
    """Weight of the entropy bonus in the policy loss."""
    old_log_probabilities: Literal["Engine", "Trainer"] = "Engine"
    """Whose log-probabilities of the sampled tokens the ratio is against. Engine takes those that generation gave with
    the tokens. Trainer computes them again on the training ranks, with the weights before the iteration's first
    step."""
    mismatch_correction: MismatchCorrection = Field(default_factory=MismatchCorrection)
    """Correction of the mismatch between the trainer's log-probabilities and the engine's."""
    loss_aggregation: LossAggregation = "TokenMean"
    """How losses of the policy's tokens become one: SequenceMean averages over a response, then over responses;
    TokenMean over the tokens of a mini-batch; ConstantLength divides their sum by responses x
    rollout.maxResponseTokens."""
    epochs: Epochs = 1
    """Passes over the samples of an iteration."""
    mini_batch_size: MiniBatchSize = 64
    """Samples per optimizer step; must divide rollout.batchSize."""

    @property
    def recomputes_logprobs(self) -> bool:
        return self.old_log_probabilities == "Trainer"

    @property
    def corrects_mismatch(self) -> bool:
        return self.mismatch_correction.mode != "Disabled"

    @classmethod
    def shared_rules(cls, path: str) -> Iterator[Rule]:
        yield from mismatch.rules(path)

    @property
    def tasks(self) -> tuple[Task, ...]:
        return tuple(task for task in self.all_tasks if self.kl_coefficient or task is not SCORE_REFERENCE)

    def resolved(self, absolute: Callable[[str], str]) -> Self:
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        correction = self.mismatch_correction.resolved()
        return self.model_copy(update={"clip_range_high": high, "mismatch_correction": correction})
