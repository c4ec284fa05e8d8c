"""What users' code is given besides samples: variables of its processes, headers of requests, and their Secrets."""

import re
from collections.abc import Iterable
from typing import Annotated, Final

from pydantic import Field

from rlhf_api.api_model import NAME_PATTERN, ApiModel
from rlhf_common.kubernetes_names import SUBDOMAIN_FORM, SUBDOMAIN_MAX

SECRET_PREFIX: Final = "RLHF_SECRET_"  # noqa: S105 a name, not a secret
"""Beginning of the environment variables that carry Secrets of users' code."""


class SecretKey(ApiModel):
    """One key of a Secret in the job's namespace; `rlhf run` reads it from an environment variable."""

    name: Annotated[str, Field(pattern=SUBDOMAIN_FORM, max_length=SUBDOMAIN_MAX, examples=["judge"])]
    """Name of the Secret."""
    key: Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253, examples=["token"])]
    """Key of the Secret."""


class CodeVariable(ApiModel):
    """An environment variable of users' code: exactly one of value, secretKeyRef."""

    name: Annotated[str, Field(pattern=NAME_PATTERN, max_length=253, examples=["JUDGE_TOKEN"])]
    """Name of the variable."""
    value: Annotated[str, Field(max_length=32768)] | None = None
    """Stored and shown in clear text."""
    secret_key_ref: SecretKey | None = None
    """Secret that holds the value."""


class RewardHeader(ApiModel):
    """A header of every request: exactly one of value, secretKeyRef."""

    name: Annotated[str, Field(pattern=r"^[-A-Za-z0-9!#$%&'*+.^_`|~]+$", max_length=253, examples=["Authorization"])]
    """Name of the header."""
    value: Annotated[str, Field(pattern=r"^[ -~]*$", max_length=8192, examples=["application/json"])] | None = None
    """Stored and shown in clear text."""
    secret_key_ref: SecretKey | None = None
    """Secret that holds the whole value, such as `Bearer abc`."""


def secret_variables(keys: Iterable[SecretKey]) -> dict[SecretKey, str]:
    """Return key of a Secret -> environment variable by which its value reaches the processes that run users' code.

    Key `token` of Secret `judge` has RLHF_SECRET_JUDGE_TOKEN; where two keys would have the same variable, the later
    ones are numbered. Pods get the variables from Secrets, `rlhf run` from the environment in which it is started, so
    a value is in no ConfigMap, no file of ours and no message.
    """
    variables: dict[SecretKey, str] = {}
    for key in dict.fromkeys(keys):
        plain = SECRET_PREFIX + re.sub(r"[^A-Z0-9]", "_", f"{key.name}_{key.key}".upper())
        taken, name, number = set(variables.values()), plain, 2
        while name in taken:
            name, number = f"{plain}_{number}", number + 1
        variables[key] = name
    return variables
