"""`spec.training.lora`: low-rank adapters in place of full training, with the names and defaults of PEFT."""

from typing import Annotated, Final, Literal

from pydantic import Field

from rlhf_api.api_model import LARGEST, ApiModel, Location

TargetModule = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""A linear map of a layer, by the name that Hugging Face's models and PEFT give it."""
EVERY_TARGET: Final[tuple[TargetModule, ...]] = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
)  # fmt: skip
"""All linear maps of a layer: what PEFT calls all-linear."""


class Lora(ApiModel):
    """Low-rank adapters: a matrix W of a frozen model computes as W + alpha / rank x B A, and only A, of `rank` rows,
    and B, of `rank` columns, are trained. A begins random, by spec.seed and its name, and B at zero, so the job begins
    with the model of the folder. There is no dropout: it would train another policy than the one that sampled."""

    rank: Annotated[int, Field(ge=1, le=4096)] = 8
    """Rank of every adapter, PEFT's r."""
    alpha: Annotated[float, Field(gt=1e-6, le=LARGEST)] = 8.0
    """Scale of every adapter times its rank, PEFT's lora_alpha: B A counts alpha / rank times."""
    target_modules: Annotated[list[TargetModule], Field(min_length=1, max_length=7)] = Field(
        default_factory=lambda: list(EVERY_TARGET)
    )
    """Linear maps of each layer that have an adapter."""
    models: Literal["All", "Policy"] = "All"
    """All trains every model of the job by adapters, a critic with its whole value head. Policy trains the actor by
    adapters, and critics in full."""

    adapter: Location | None = None
    """PEFT folder of adapters from which the actor starts, with the same rank, alpha and targetModules. Unset: B starts
    at zero. The reference, where spec.models.reference is unset, is the actor's folder without them."""
    publish: Literal["Merged", "Adapters"] = "Merged"
    """What goes from the training ranks to workers. Merged: whole models, W + alpha / rank x B A. Adapters: A and B
    alone, to which each worker adds the frozen weights from its own copy of the model's folder."""

    trunk: Literal["Separate", "Shared"] = "Separate"
    """Shared holds the frozen weights of models of one folder once: on a training rank for actor and critic, and on
    workers that score for the reference and a critic. Separate: once a model.
    Shared needs publish Adapters, models All, and one folder for all of them."""

    @property
    def scale(self) -> float:
        """Return what B A is multiplied by."""
        return self.alpha / self.rank
