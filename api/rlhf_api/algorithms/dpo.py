"""Direct preference optimisation on a file of pairs: fields and graph. Its loss is `rlhf_workers.algorithms.dpo`."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlhf_api.algorithms.fields import Positive
from rlhf_api.algorithms.graph import SCORE_REFERENCE, TRAIN_ON_RESPONSES
from rlhf_api.algorithms.pairs import FilePairFields, PairFields


class PreferenceFields(PairFields):
    """Fields of the loss of direct preference optimisation, for pairs of any origin."""

    beta: Positive = 0.1
    """Strength of the pull towards the reference; the Sigmoid loss multiplies log-ratios by beta."""
    loss: Literal["Sigmoid", "IPO"] = "Sigmoid"
    """Sigmoid is DPO. IPO regresses the difference of the log-ratios to 1 / (2 beta)."""
    label_smoothing: Annotated[float, Field(ge=0, le=0.49)] = 0.0
    """Assumed share of pairs with swapped labels. Sigmoid only."""


class DPO(FilePairFields, PreferenceFields):
    """Direct preference optimisation: the actor learns from the response pairs of spec.prompts.path, without a reward.
    The inference group computes log-probabilities of the reference."""

    summary: ClassVar = "Direct preference optimisation on pairs of the prompt file; nothing is generated."
    all_tasks: ClassVar = (SCORE_REFERENCE, TRAIN_ON_RESPONSES)
