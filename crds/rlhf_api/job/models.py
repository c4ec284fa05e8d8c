"""`spec.models`: where each model role comes from. A role that the algorithm's graph does not need is left out."""

import re
from typing import Annotated, ClassVar, Final

from pydantic import Field

from rlhf_api.algorithms.roles import ModelKind, ModelRole
from rlhf_api.api_model import MODULE_PATTERN, NAME_PATTERN, ApiModel, Location
from rlhf_api.kubernetes_names import SUBDOMAIN_FORM, SUBDOMAIN_MAX

SECRET_PREFIX: Final = "RLHF_SECRET_"  # noqa: S105 a name, not a secret
"""Beginning of the environment variables that carry Secrets of a reward."""


class ModelSource(ApiModel):
    """A causal language model in the Hugging Face format."""

    path: Location
    """Folder with config.json, tokenizer and safetensors, relative to the manifest, or a hub id such as owner/name."""


class SecretKey(ApiModel):
    """One key of a Secret in the job's namespace; `rlhf run` reads it from an environment variable."""

    name: Annotated[str, Field(pattern=SUBDOMAIN_FORM, max_length=SUBDOMAIN_MAX, examples=["judge"])]
    """Name of the Secret."""
    key: Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253, examples=["token"])]
    """Key in the Secret's data."""


class RewardVariable(ApiModel):
    """An environment variable of a reward function's process: exactly one of value, secretKeyRef."""

    name: Annotated[str, Field(pattern=NAME_PATTERN, max_length=253, examples=["JUDGE_TOKEN"])]
    """Name of the variable."""
    value: Annotated[str, Field(max_length=32768)] | None = None
    """Value, stored and shown in clear text."""
    secret_key_ref: SecretKey | None = None
    """Secret that holds the value."""


class RewardHeader(ApiModel):
    """A header of every request to a reward endpoint: exactly one of value, secretKeyRef."""

    name: Annotated[str, Field(pattern=r"^[-A-Za-z0-9!#$%&'*+.^_`|~]+$", max_length=253, examples=["Authorization"])]
    """Name of the header."""
    value: Annotated[str, Field(pattern=r"^[ -~]*$", max_length=8192, examples=["application/json"])] | None = None
    """Value, stored and shown in clear text."""
    secret_key_ref: SecretKey | None = None
    """Secret that holds the whole value, such as `Bearer abc`."""


class RewardFunction(ApiModel):
    """A Python function `name(prompt, response, record) -> float | None`, sync or async. None abstains: the sample is
    not trained on."""

    exactly_one: ClassVar = ("file", "module", "config_map")

    file: Location | None = None
    """Path of a Python file, relative to the manifest."""
    module: (
        Annotated[
            str,
            Field(
                pattern=MODULE_PATTERN,
                max_length=253,
                examples=["rewards.arithmetic"],
            ),
        ]
        | None
    ) = None
    """Name of an importable module, in place of file."""
    config_map: (
        Annotated[
            str,
            Field(pattern=SUBDOMAIN_FORM, max_length=SUBDOMAIN_MAX, examples=["my-reward"]),
        ]
        | None
    ) = None
    """Name of a ConfigMap whose key reward.py holds the function, in place of file. In a cluster only."""
    name: Annotated[str, Field(pattern=NAME_PATTERN, max_length=253, examples=["score"])] = "score"
    """Name of the function."""
    env: Annotated[list[RewardVariable], Field(max_length=64)] = Field(default_factory=list)
    """Environment variables of the function's process. It gets no other variables but those that Python needs."""


class RewardEndpoint(ApiModel):
    """An HTTP endpoint: POST {"samples": [{"prompt", "response", "record"}]} -> {"rewards": [float | null]}."""

    url: Annotated[str, Field(pattern=r"^https?://[^/ ]+", max_length=2048, examples=["http://rewards:8000/score"])]
    """URL, http or https."""
    headers: Annotated[list[RewardHeader], Field(max_length=32)] = Field(default_factory=list)
    """Headers of every request."""


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
    """Seconds that the reward of one sample may take. A slower one is retried and at last fails the job; it is never
    taken to be zero."""
    retries: Annotated[int, Field(ge=0, le=20)] = 2
    """Tries after the first failure, before the job fails."""

    @property
    def kind(self) -> str:
        """Name of the member that is set: function, model or endpoint."""
        return next(name for name in self.exactly_one if getattr(self, name) is not None)

    def secret_keys(self) -> tuple[SecretKey, ...]:
        """Return the keys of Secrets that the reward is given, each once, in the order of the manifest."""
        members = [*(self.function.env if self.function else ()), *(self.endpoint.headers if self.endpoint else ())]
        return tuple(dict.fromkeys(member.secret_key_ref for member in members if member.secret_key_ref is not None))

    def secret_variables(self) -> dict[SecretKey, str]:
        """Return key of a Secret -> environment variable by which its value reaches the processes that run rewards.

        Key `token` of Secret `judge` has RLHF_SECRET_JUDGE_TOKEN; where two keys would have the same variable, the
        later ones are numbered. Pods get the variables from Secrets, `rlhf run` from the environment in which it is
        started, so a value is in no ConfigMap, no file of ours and no message.
        """
        variables: dict[SecretKey, str] = {}
        for key in self.secret_keys():
            plain = SECRET_PREFIX + re.sub(r"[^A-Z0-9]", "_", f"{key.name}_{key.key}".upper())
            taken, name, number = set(variables.values()), plain, 2
            while name in taken:
                name, number = f"{plain}_{number}", number + 1
            variables[key] = name
        return variables


class Models(ApiModel):
    """The model roles of the job."""

    actor: ModelSource
    """The policy that is trained."""
    critic: ModelSource | None = None
    """The value model: a causal language model, whose value head starts at zero, or a reward model, whose head it
    keeps. Unset: it starts from the actor. Algorithms without a critic ignore it, so that changing the algorithm is a
    change of one field."""
    reference: ModelSource | None = None
    """The frozen model with which the KL term compares the actor. Unset: the actor's own model."""
    reward: Reward
    """Where rewards come from."""

    def given(self, role: ModelRole) -> ModelSource | None:
        """Return the model that the manifest gives for a role; None where it gives none, or no model at all."""
        if role.kind is ModelKind.REWARD:
            judge: Reward = getattr(self, role)
            return judge.model
        source: ModelSource | None = getattr(self, role)
        return source

    def source(self, role: ModelRole) -> ModelSource | None:
        """Return the model that a role starts from: the actor's where none is given. None: user code is called."""
        return self.given(role) or (None if role.kind is ModelKind.REWARD else self.actor)

    def path_field(self, role: ModelRole) -> str:
        """Return the manifest path of the path of the model that a role starts from, for messages."""
        if role.kind is ModelKind.REWARD:
            return f"{role.manifest_path}.model.path"
        given = role if self.given(role) is not None else ModelRole.ACTOR
        return f"{given.manifest_path}.path"
