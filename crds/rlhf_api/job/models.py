"""`spec.models`: where each model role comes from. A role the algorithm's graph does not need is left out."""

from typing import Annotated, ClassVar

from pydantic import Field

from rlhf_api.job.base import ApiModel, Location
from rlhf_api.labels import SUBDOMAIN_FORM, SUBDOMAIN_MAX


class ModelSource(ApiModel):
    """A causal language model in the Hugging Face format."""

    path: Location
    """A folder (or mounted volume path) with config.json, tokenizer and safetensors, or a hub id."""


class RewardFunction(ApiModel):
    """A Python function `name(prompt, response, record) -> float | None`, sync or async; None abstains."""

    exactly_one: ClassVar = ("file", "module", "config_map")

    file: Location | None = None
    """Path of a Python file, relative to the manifest."""
    module: (
        Annotated[
            str,
            Field(
                pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$",
                max_length=253,
                examples=["rewards.arithmetic"],
            ),
        ]
        | None
    ) = None
    """Importable module; alternative to file."""
    config_map: (
        Annotated[
            str,
            Field(pattern=SUBDOMAIN_FORM, max_length=SUBDOMAIN_MAX, examples=["my-reward"]),
        ]
        | None
    ) = None
    """Name of a ConfigMap whose key reward.py holds the function (in a cluster); alternative to file."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=253, examples=["score"])] = "score"
    """Name of the function."""


class RewardEndpoint(ApiModel):
    """An HTTP endpoint: POST {"samples": [{"prompt", "response", "record"}]} -> {"rewards": [float | null]}."""

    url: Annotated[str, Field(pattern=r"^https?://[^/ ]+", max_length=2048, examples=["http://rewards:8000/score"])]
    """Address, http or https."""


class Reward(ApiModel):
    """Where rewards come from: exactly one of function, model, endpoint."""

    exactly_one: ClassVar = ("function", "model", "endpoint")

    function: RewardFunction | None = None
    """A Python function run in inference workers."""
    model: ModelSource | None = None
    """A sequence classification model with one output, run in inference workers."""
    endpoint: RewardEndpoint | None = None
    """An HTTP endpoint."""
    timeout_seconds: Annotated[int, Field(ge=1, le=86400)] = 60
    """Time one sample may take; a slower one is retried, then fails the job. Never a zero reward."""
    retries: Annotated[int, Field(ge=0, le=20)] = 2
    """Further tries after a failure, before the job fails."""


class Models(ApiModel):
    """The model roles of the job."""

    actor: ModelSource
    """The policy that is trained."""
    critic: ModelSource | None = None
    """The value model: a causal language model folder, or a reward model, whose head it keeps; without a head it begins
    at zero.
    Left unused by algorithms without a critic, so that changing the algorithm stays a change of one field."""
    reference: ModelSource | None = None
    """The frozen model the KL term compares with; the actor's own folder when unset."""
    reward: Reward
    """Where rewards come from."""
