"""What users' code is given besides samples: variables of its processes, or headers of an endpoint's requests.

Rule: a value from a Secret goes to the process or the request it is for and nowhere else; `secrets` says which values
no text may quote. Must never guess a value that is not there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rlhf_api.job.reward_headers import CodeVariable, RewardHeader, SecretKey
from rlhf_common.names import ExitCode
from rlhf_workers.failures import WorkError


@dataclass(frozen=True)
class CodeSettings:
    """Names with their values."""

    values: Mapping[str, str]
    secret: frozenset[str] = frozenset()
    """Names whose value is one."""

    @property
    def secrets(self) -> tuple[str, ...]:
        """Values that no text may quote."""
        return tuple(self.values[name] for name in sorted(self.secret))


NO_SETTINGS: Final = CodeSettings({})


def resolve_settings(
    entries: Sequence[CodeVariable | RewardHeader],
    field: str,
    known: Mapping[SecretKey, str],
    environ: Mapping[str, str],
    *,
    invalid: str,
) -> CodeSettings:
    """`entries` of manifest field `field`, those from Secrets read from `environ` by the variables of `known`;
    WorkError with reason `invalid` when one is not there."""
    values: dict[str, str] = {}
    for entry in entries:
        if entry.secret_key_ref is None:
            values[entry.name] = entry.value or ""
            continue
        variable, reference = known[entry.secret_key_ref], entry.secret_key_ref
        if variable not in environ:
            message = (
                f"{field}: {entry.name}: key {reference.key} of Secret {reference.name} is not in this process's "
                f"environment as {variable}"
            )
            raise WorkError(invalid, message, field=field, exit_code=ExitCode.USAGE)
        values[entry.name] = environ[variable]
    return CodeSettings(values, frozenset(entry.name for entry in entries if entry.secret_key_ref is not None))
