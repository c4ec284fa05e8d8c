"""`spec.rollout.environment`: user code that replies to the policy in dialogues of several turns."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlhf_api.api_model import MODULE_PATTERN, NAME_PATTERN, ApiModel, Location
from rlhf_api.job.reward_headers import CodeVariable, SecretKey
from rlhf_common.kubernetes_names import SUBDOMAIN_FORM, SUBDOMAIN_MAX

ConfigMapName = Annotated[str, Field(pattern=SUBDOMAIN_FORM, max_length=SUBDOMAIN_MAX)]
"""Name of a ConfigMap with a user's Python code."""


class Environment(ApiModel):
    """A Python class with `reset(record)` and `step(response)`. Its answers are appended to the response and the policy
    continues; answers are not trained on. Generation workers run it in processes."""

    exactly_one: ClassVar = ("file", "module", "config_map")

    file: Location | None = None
    """Path of a Python file, relative to the manifest. In a cluster, a volume or the image provides it."""
    module: (
        Annotated[str, Field(pattern=MODULE_PATTERN, max_length=253, examples=["environments.calculator"])] | None
    ) = None
    """Name of an importable module, instead of file."""
    config_map: Annotated[ConfigMapName, Field(examples=["my-game"])] | None = None
    """Name of a ConfigMap with the class under the key environment.py, instead of file. Clusters only."""
    name: Annotated[str, Field(pattern=NAME_PATTERN, max_length=253)] = "Environment"
    """Name of the class."""
    env: Annotated[list[CodeVariable], Field(max_length=64)] = Field(default_factory=list)
    """Environment variables of its processes, besides a few such as PATH and HOME."""
    max_turns: Annotated[int, Field(ge=1, le=1000)] = 8
    """Maximum turns of the policy. A response still unfinished then ends with finish reason length. maxResponseTokens
    limits all turns and answers together."""
    timeout_seconds: Annotated[int, Field(ge=1, le=86400)] = 60
    """Seconds to answer a turn, times the number of turns so far: a new process repeats earlier turns. Then the process
    is killed and the sample fails; see sampleRetries."""

    cache_between_turns: Literal["Disabled", "Enabled"] = "Enabled"
    """Enabled keeps the KV caches of samples that wait for the environment, of at most maxBatchSize per worker."""

    def secret_keys(self) -> tuple[SecretKey, ...]:
        """Return the keys of Secrets that its processes receive, in the order of the manifest."""
        return tuple(variable.secret_key_ref for variable in self.env if variable.secret_key_ref is not None)


class EnvironmentReward(ApiModel):
    """The sum of the step rewards from spec.rollout.environment."""
