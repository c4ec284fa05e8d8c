"""`spec.models`: where each model role comes from. A role the algorithm's graph does not need must not be given."""

from typing import Annotated

from pydantic import Field, model_validator

from rlhf_api.job.base import ApiModel


class ModelSource(ApiModel):
    """A causal language model in the Hugging Face format."""

    path: Annotated[str, Field(min_length=1)]
    """A folder (or mounted volume path) with config.json, tokenizer and safetensors, or a hub id."""


class RewardFunction(ApiModel):
    """A Python function `name(prompt, response, record) -> float | None`, sync or async; None abstains."""

    file: str | None = None
    """Path of a Python file, relative to the manifest."""
    module: str | None = None
    """Importable module; alternative to file."""
    config_map: str | None = None
    """Name of a ConfigMap whose key reward.py holds the function (in a cluster); alternative to file."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = "score"
    """Name of the function."""

    @model_validator(mode="after")
    def _one_place(self) -> "RewardFunction":
        given = [name for name in ("file", "module", "config_map") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"exactly one of file, module, configMap must be set, got {', '.join(given) or 'none'}")
        return self


class RewardEndpoint(ApiModel):
    """An HTTP endpoint: POST {"samples": [{"prompt", "response", "record"}]} -> {"rewards": [float | null]}."""

    url: Annotated[str, Field(pattern=r"^https?://")]
    """Address, http or https."""


class Reward(ApiModel):
    """Where rewards come from: exactly one of function, model, endpoint."""

    function: RewardFunction | None = None
    """A Python function run in inference workers."""
    model: ModelSource | None = None
    """A sequence classification model with one output, run in inference workers."""
    endpoint: RewardEndpoint | None = None
    """An HTTP endpoint."""
    timeout_seconds: Annotated[int, Field(ge=1)] = 60
    """Time one sample may take; a slower one is retried, then fails the job. Never a zero reward."""
    retries: Annotated[int, Field(ge=0, le=20)] = 2
    """Further tries after a failure, before the job fails."""

    @model_validator(mode="after")
    def _exactly_one(self) -> "Reward":
        given = [name for name in ("function", "model", "endpoint") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of function, model, endpoint must be set, got {', '.join(given) or 'none'}")
        return self


class Models(ApiModel):
    """The model roles of the job."""

    actor: ModelSource
    """The policy that is trained."""
    critic: ModelSource | None = None
    """The value model: a causal language model folder; a missing value head is initialised to zero. Only with ppo."""
    reference: ModelSource | None = None
    """The frozen model the KL term compares with; the actor's own folder when unset."""
    reward: Reward
    """Where rewards come from."""
