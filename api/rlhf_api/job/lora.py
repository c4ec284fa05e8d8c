"""`spec.training.lora`: low-rank adapters instead of full training, with the names and defaults of PEFT."""

from typing import Annotated, Final, Literal

from pydantic import Field

from rlhf_api.api_model import LARGEST, ApiModel, Location

TargetModule = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""A linear map of a layer, by its name in Hugging Face models and PEFT."""
EVERY_TARGET: Final[tuple[TargetModule, ...]] = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
)  # fmt: skip
"""All linear maps of a dense layer, as with PEFT's all-linear."""


class Lora(ApiModel):
    """Low-rank adapters: a frozen matrix W computes as W + alpha / rank x B A; A (`rank` rows) and B (`rank` columns)
    are trained. Without `adapter`, A starts random, from spec.seed and its name; B starts at zero, so the job starts
    with the folder's model. There is no dropout: it would train another policy than the one that sampled."""

    rank: Annotated[int, Field(ge=1, le=4096)] = 8
    """Rank of every adapter, PEFT's r."""
    alpha: Annotated[float, Field(gt=1e-6, le=LARGEST)] = 8.0
    """Scale of every adapter times its rank, PEFT's lora_alpha: the factor of B A is alpha / rank."""
    target_modules: Annotated[list[TargetModule], Field(min_length=1, max_length=7)] = Field(
        default_factory=lambda: list(EVERY_TARGET)
    )
    """Linear maps of each layer that get an adapter."""
    models: Literal["All", "Policy"] = "All"
    """All trains the algorithm's models with adapters, but value and score heads in full. Policy trains critics in
    full, and other models as All does."""

    adapter: Location | None = None
    """PEFT folder of the actor's initial adapters, with the same rank, alpha and targetModules. Unset: B starts at
    zero. If spec.models.reference is unset, the reference is the actor's folder without
    adapters."""
    publish: Literal["Merged", "Adapters"] = "Merged"
    """Content that training ranks send to workers. Merged: whole models, W + alpha / rank x B A. Adapters: only A
    and B; each worker adds the frozen weights from its own copy of the folder."""

    trunk: Literal["Separate", "Shared"] = "Separate"
    """Shared stores the frozen weights of models from one folder once: for actor and critic on a training rank, for
    reference and critic on scoring workers. Separate: once per model. Shared needs publish Adapters, models All, and
    the same folder for all."""

    @property
    def scale(self) -> float:
        """Return the factor of B A."""
        return self.alpha / self.rank
