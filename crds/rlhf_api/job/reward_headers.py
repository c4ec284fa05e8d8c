"""What a reward is given besides samples: variables of a function's process, headers of requests, and their Secrets."""

from typing import Annotated

from pydantic import Field

from rlhf_api.api_model import NAME_PATTERN, ApiModel
from rlhf_api.kubernetes_names import SUBDOMAIN_FORM, SUBDOMAIN_MAX


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
