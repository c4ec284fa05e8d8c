"""Manifest fields of every algorithm, and the questions that the rest of the project asks of one."""

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
    """One algorithm: its fields and their consequences."""

    summary: ClassVar[str]
    """One sentence: the description of its member of `spec.algorithm`."""
    all_tasks: ClassVar[tuple[Task, ...]]
    """All tasks that it may have for any values of its fields, in the order of the stages."""

    samples_per_unit: ClassVar[int] = 1
    """Number of consecutive samples that stay in one micro-batch: 2 for pairs."""
    greedy_baseline: ClassVar[bool] = False
    """Whether each prompt gets one more response, its last sample, decoded greedily. Its reward is the baseline for the
    others; it is not trained on."""

    advantages_by_group: ClassVar[bool] = False
    """Whether the advantages of a response depend on the responses to its prompt alone, so that gradients of a prompt
    can be computed before the batch is complete."""

    if TYPE_CHECKING:  # Fields of every algorithm, which each declares in its own order in the manifest.
        epochs: int
        mini_batch_size: int

    @property
    @abstractmethod
    def responses_per_prompt(self) -> int:
        """Number of responses per prompt that are trained on."""

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks that it has with these values."""
        return self.all_tasks

    @property
    def response_keys(self) -> tuple[str, ...]:
        """Keys of the responses in a line of the prompt file, in the order of the samples of a group. Empty for an
        algorithm that generates them."""
        return ()

    @property
    def refill(self) -> RefillRule:
        """Rule that replaces groups without a learning signal; by default none is replaced."""
        return RefillRule(0)

    @property
    def files(self) -> Mapping[str, str]:
        """User files that workers open: field name below the algorithm -> path."""
        return {}

    @property
    def recomputes_logprobs(self) -> bool:
        """Whether training ranks compute the log-probabilities of the sampled tokens before they train on them."""
        return False

    @property
    def corrects_mismatch(self) -> bool:
        """Whether the policy loss is corrected for the mismatch between trainer and sampler."""
        return False

    @property
    def whitens_batch(self) -> bool:
        """Whether advantages are whitened over the response tokens of a batch."""
        return False

    def trains_policy(self, iteration: int) -> bool:
        """Return whether an iteration (from 0) updates the policy; False during critic warm-up."""
        return True

    @classmethod
    def shared_rules(cls, path: str) -> Iterator[Rule]:
        """Yield the rules of fields that several algorithms share; `path` as for `rules`."""
        yield from ()

    @classmethod
    def rules(cls, path: str) -> Iterator[Rule]:
        """Yield this algorithm's own rules; `path` is that of its fields, such as `spec.algorithm.ppo`."""
        yield from ()

    def resolved(self, absolute: Callable[[str], str]) -> Self:
        """Return it with defaults that depend on other fields filled in, and with absolute paths. `absolute` makes a
        path of the manifest absolute."""
        return self


class PolicyGradientFields(AlgorithmFields):
    """Fields of policy gradients with importance ratios. Without a KL term there is no reference model."""

    kl_coefficient: NonNegative = 0.02
    """Weight of the KL divergence to the reference model; 0 trains without a reference."""
    kl_estimator: KLEstimator | None = None
    """Estimator of a token's divergence d = log p - log r from the reference: K1 is d, K2 is d^2 / 2, K3 is exp(-d) - 1
    + d, Unbiased is K3 times the ratio of the policy to the sampling policy, for the loss only. Unset: K1 in rewards,
    K3 in the loss."""
    clip_range: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio of new to old probability is clipped to [1 - clipRange, 1 + clipRangeHigh]."""
    clip_range_high: Positive | None = None
    """Upper clip range; clipRange when unset."""
    dual_clip: Annotated[float, Field(gt=1, le=LARGEST)] | None = None
    """Ratio at which the loss stops growing if the advantage is negative; 3 is usual, unset is off."""
    entropy_coefficient: NonNegative = 0.0
    """Weight of the entropy bonus in the policy loss."""
    old_log_probabilities: Literal["Engine", "Trainer"] = "Engine"
    """Log-probabilities in the ratio's denominator. Engine takes those that generation returned. Trainer recomputes
    them on the training ranks with the weights before the iteration's first step."""
    mismatch_correction: MismatchCorrection = Field(default_factory=MismatchCorrection)
    """Correction of the mismatch between the trainer's log-probabilities and the engine's."""
    loss_aggregation: LossAggregation = "TokenMean"
    """How token losses combine: SequenceMean averages over a response, then over responses; TokenMean over the tokens
    of a mini-batch; ConstantLength divides their sum by responses x rollout.maxResponseTokens."""
    epochs: Epochs = 1
    """Passes over the samples of a batch."""
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
