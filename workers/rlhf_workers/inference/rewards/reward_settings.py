"""How a reward uses what it is given besides samples: headers as a request takes them, and no Secret in any text.

Rule: `redacted` takes a value from a Secret out of every text that may quote it before the text is logged or reported.
"""

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
"""Reason of the failure of a setting that cannot be used."""


def reward_settings(entries: Sequence[CodeVariable | RewardHeader], field: str, spec: RLHFJobSpec) -> CodeSettings:
    """Return what manifest field `field` of a reward gives; WorkError when a Secret is not in this process's
    environment."""
    return resolve_settings(entries, field, spec.secret_variables(Group.INFERENCE), os.environ, invalid=INVALID)


def header_values(settings: CodeSettings, field: str) -> dict[str, str]:
    """Return the headers as a request takes them.

    What is at the ends of a line, such as a file's last newline, is no part of a value.
    """
    result = {name: value.strip() for name, value in settings.values.items()}
    for name, value in result.items():
        if not (value.isascii() and (value.isprintable() or not value)):
            message = f"{field}: {name}: its value must be one line of printable ASCII characters"
            raise WorkError(INVALID, message, field=field, exit_code=ExitCode.USAGE)
    return result


def redacted(text: str, secrets: Iterable[str]) -> str:
    """`text` with HIDDEN for each of `secrets`, as they are and without white space at their ends."""
    return hide(text, forms_of(secrets))
