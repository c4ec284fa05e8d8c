"""Direct preference optimisation on a file of pairs: fields and graph. Its loss is `rlhf_workers.algorithms.dpo`."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlhf_api.algorithms.fields import Positive
from rlhf_api.algorithms.graph import SCORE_REFERENCE, TRAIN_ON_RESPONSES
from rlhf_api.algorithms.pairs import FilePairFields, PairFields


class PreferenceFields(PairFields):
    """Numbers of the loss of direct preference optimisation, wherever the pairs come from."""

    beta: Positive = 0.1
    """How strongly the policy is held to the reference: the loss is over beta times the log-ratios."""
    loss: Literal["Sigmoid", "IPO"] = "Sigmoid"
    """Sigmoid is DPO. IPO draws the difference of the log-ratios to 1 / (2 beta), and no further."""
    label_smoothing: Annotated[float, Field(ge=0, le=0.49)] = 0.0
    """Share of pairs whose labels are taken to be the wrong way round. Sigmoid only."""


class DPO(FilePairFields, PreferenceFields):
    """Direct preference optimisation: the actor learns from pairs of responses of spec.prompts.path, without a reward.
    The inference group gives log-probabilities of the reference."""

    summary: ClassVar = "Direct preference optimisation on pairs of the prompt file; nothing is generated."
    all_tasks: ClassVar = (SCORE_REFERENCE, TRAIN_ON_RESPONSES)
