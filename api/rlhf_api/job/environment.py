"""`spec.rollout.environment`: what answers the turns of the policy, so that a response has several."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlhf_api.api_model import MODULE_PATTERN, NAME_PATTERN, ApiModel, Location
from rlhf_api.job.reward_headers import CodeVariable, SecretKey
from rlhf_common.kubernetes_names import SUBDOMAIN_FORM, SUBDOMAIN_MAX

ConfigMapName = Annotated[str, Field(pattern=SUBDOMAIN_FORM, max_length=SUBDOMAIN_MAX)]
"""Name of a user's ConfigMap, which holds Python code."""


class Environment(ApiModel):
    """A Python class with `reset(record)` and `step(response)`, whose answers are appended to the response: the policy
    goes on after them, and is not trained on them. Processes of generation workers run it."""

    exactly_one: ClassVar = ("file", "module", "config_map")

    file: Location | None = None
    """Path of a Python file, relative to the manifest. In a cluster a volume or image holds it."""
    module: (
        Annotated[str, Field(pattern=MODULE_PATTERN, max_length=253, examples=["environments.calculator"])] | None
    ) = None
    """Name of an importable module, in place of file."""
    config_map: Annotated[ConfigMapName, Field(examples=["my-game"])] | None = None
    """Name of a ConfigMap whose key environment.py holds the class, in place of file. In a cluster only."""
    name: Annotated[str, Field(pattern=NAME_PATTERN, max_length=253)] = "Environment"
    """Name of the class."""
    env: Annotated[list[CodeVariable], Field(max_length=64)] = Field(default_factory=list)
    """Environment variables of its processes. They get no other variables but those that Python needs."""
    max_turns: Annotated[int, Field(ge=1, le=1000)] = 8
    """Turns of the policy at most; a response that the environment does not end by then ends there (finish reason:
    length). maxResponseTokens bounds all turns and answers together."""
    timeout_seconds: Annotated[int, Field(ge=1, le=86400)] = 60
    """Seconds that answering one turn may take; then its process is killed and the sample fails, see sampleRetries."""

    cache_between_turns: Literal["Disabled", "Enabled"] = "Enabled"
    """Enabled keeps a sample's KV cache while its turn is answered."""

    def secret_keys(self) -> tuple[SecretKey, ...]:
        """Return the keys of Secrets that its processes are given, in the order of the manifest."""
        return tuple(variable.secret_key_ref for variable in self.env if variable.secret_key_ref is not None)


class EnvironmentReward(ApiModel):
    """What spec.rollout.environment gave: the sum of the rewards of its steps."""
