"""Settings of rewards: variables and headers from the manifest, and removal of the values of Secrets from texts."""

import os
from collections.abc import Iterable, Sequence
from typing import Final

from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.reward_headers import CodeVariable, RewardHeader
from rlhf_common.names import ExitCode, Group
from rlhf_workers.failures import WorkError
from rlhf_workers.user_code.code_settings import CodeSettings, resolve_settings
from rlhf_workers.user_code.user_host import forms_of, hide

INVALID: Final = "RewardInvalid"
"""Failure reason of an invalid setting."""


def reward_settings(entries: Sequence[CodeVariable | RewardHeader], field: str, spec: RLHFJobSpec) -> CodeSettings:
    """Return the settings of manifest field `field`; WorkError when a Secret is missing from the environment."""
    return resolve_settings(entries, field, spec.secret_variables(Group.INFERENCE), os.environ, invalid=INVALID)


def header_values(settings: CodeSettings, field: str) -> dict[str, str]:
    """Return the headers as a request takes them, without white space around values; WorkError for a value that no
    header can have.
    """
    result = {name: value.strip() for name, value in settings.values.items()}
    for name, value in result.items():
        if not (value.isascii() and (value.isprintable() or not value)):
            message = f"{field}: {name}: its value must be one line of printable ASCII characters"
            raise WorkError(INVALID, message, field=field, exit_code=ExitCode.USAGE)
    return result


def redacted(text: str, secrets: Iterable[str]) -> str:
    """Return `text` with HIDDEN in place of each secret, with or without white space at its ends."""
    return hide(text, forms_of(secrets))
