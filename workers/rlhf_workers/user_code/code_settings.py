"""Settings of users' code: environment variables of its processes, or headers of requests to its endpoint.

Must never invent the value of a Secret.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rlhf_api.job.reward_headers import CodeVariable, RewardHeader, SecretKey
from rlhf_common.names import ExitCode
from rlhf_workers.failures import WorkError


@dataclass(frozen=True)
class CodeSettings:
    """Names and their values."""

    values: Mapping[str, str]
    secret: frozenset[str] = frozenset()
    """Names whose value is a secret."""

    @property
    def secrets(self) -> tuple[str, ...]:
        """Values that no text may quote."""
        return tuple(self.values[name] for name in sorted(self.secret))


NO_SETTINGS: Final = CodeSettings({})


def resolve_settings(
    entries: Sequence[CodeVariable | RewardHeader],
    field: str,
    variables: Mapping[SecretKey, str],
    environ: Mapping[str, str],
    *,
    invalid: str,
) -> CodeSettings:
    """Resolve `entries` of the manifest field `field`; `variables`: Secret key -> its variable in `environ`.

    Raises WorkError with reason `invalid` when the value of a Secret is missing.
    """
    values: dict[str, str] = {}
    for entry in entries:
        if entry.secret_key_ref is None:
            values[entry.name] = entry.value or ""
            continue
        variable, reference = variables[entry.secret_key_ref], entry.secret_key_ref
        if variable not in environ:
            message = (
                f"{field}: {entry.name}: key {reference.key} of Secret {reference.name} is not in this process's "
                f"environment as {variable}"
            )
            raise WorkError(invalid, message, field=field, exit_code=ExitCode.USAGE)
        values[entry.name] = environ[variable]
    return CodeSettings(values, frozenset(entry.name for entry in entries if entry.secret_key_ref is not None))
