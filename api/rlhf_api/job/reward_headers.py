"""Inputs of user code besides samples: environment variables, request headers, and their Secrets."""

import re
from collections.abc import Iterable
from typing import Annotated, Final

from pydantic import Field

from rlhf_api.api_model import NAME_PATTERN, ApiModel
from rlhf_common.kubernetes_names import SUBDOMAIN_FORM, SUBDOMAIN_MAX

SECRET_PREFIX: Final = "RLHF_SECRET_"  # noqa: S105 a name, not a secret
"""Prefix of the environment variables that carry Secrets for user code."""


class SecretKey(ApiModel):
    """One key of a Secret in the job's namespace; `rlhf run` reads it from an environment variable."""

    name: Annotated[str, Field(pattern=SUBDOMAIN_FORM, max_length=SUBDOMAIN_MAX, examples=["judge"])]
    """Name of the Secret."""
    key: Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253, examples=["token"])]
    """Key of the Secret."""


class CodeVariable(ApiModel):
    """An environment variable for user code: exactly one of value, secretKeyRef."""

    name: Annotated[str, Field(pattern=NAME_PATTERN, max_length=253, examples=["JUDGE_TOKEN"])]
    """Name of the variable."""
    value: Annotated[str, Field(max_length=32768)] | None = None
    """Plain text value."""
    secret_key_ref: SecretKey | None = None
    """Secret that holds the value."""


class RewardHeader(ApiModel):
    """A header of every request: exactly one of value, secretKeyRef."""

    name: Annotated[str, Field(pattern=r"^[-A-Za-z0-9!#$%&'*+.^_`|~]+$", max_length=253, examples=["Authorization"])]
    """Name of the header."""
    value: Annotated[str, Field(pattern=r"^[ -~]*$", max_length=8192, examples=["application/json"])] | None = None
    """Plain text value."""
    secret_key_ref: SecretKey | None = None
    """Secret that holds the whole value, such as `Bearer abc`."""


def secret_variables(keys: Iterable[SecretKey]) -> dict[SecretKey, str]:
    """Return key of a Secret -> environment variable that carries its value to the processes that run user code.

    Key `token` of Secret `judge` becomes RLHF_SECRET_JUDGE_TOKEN.
    """
    variables: dict[SecretKey, str] = {}
    for key in dict.fromkeys(keys):
        plain = SECRET_PREFIX + re.sub(r"[^A-Z0-9]", "_", f"{key.name}_{key.key}".upper())
        taken, name, number = set(variables.values()), plain, 2
        while name in taken:
            name, number = f"{plain}_{number}", number + 1
        variables[key] = name
    return variables
