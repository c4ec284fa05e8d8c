"""What a reward is given besides samples: variables of a function's process, headers of an endpoint's requests.

Rule: a value from a Secret goes to the process or the request it is for and nowhere else: `redacted` takes it out of
every text that may quote it before the text is logged or reported.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rlhf_api.job.reward_headers import RewardHeader, RewardVariable, SecretKey
from rlhf_api.names import ExitCode
from rlhf_workers.failures import WorkError
from rlhf_workers.user_code.user_host import forms_of, hide


@dataclass(frozen=True)
class RewardSettings:
    """Names with their values."""

    values: Mapping[str, str]
    secret: frozenset[str] = frozenset()
    """Names whose value is one."""

    @property
    def secrets(self) -> tuple[str, ...]:
        """Values that no text may quote."""
        return tuple(self.values[name] for name in sorted(self.secret))


NO_SETTINGS: Final = RewardSettings({})


def resolve_settings(
    entries: Sequence[RewardVariable | RewardHeader],
    field: str,
    known: Mapping[SecretKey, str],
    environ: Mapping[str, str],
) -> RewardSettings:
    """`entries` of manifest field `field`, those from Secrets read from `environ` by the variables of `known`;
    WorkError when one is not there."""
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
            raise WorkError("RewardInvalid", message, field=field, exit_code=ExitCode.USAGE)
        values[entry.name] = environ[variable]
    return RewardSettings(values, frozenset(entry.name for entry in entries if entry.secret_key_ref is not None))


def header_values(settings: RewardSettings, field: str) -> dict[str, str]:
    """Return the headers as a request takes them.

    What is at the ends of a line, such as a file's last newline, is no part of a value.
    """
    result = {name: value.strip() for name, value in settings.values.items()}
    for name, value in result.items():
        if not (value.isascii() and (value.isprintable() or not value)):
            message = f"{field}: {name}: its value must be one line of printable ASCII characters"
            raise WorkError("RewardInvalid", message, field=field, exit_code=ExitCode.USAGE)
    return result


def redacted(text: str, secrets: Iterable[str]) -> str:
    """`text` with HIDDEN for each of `secrets`, as they are and without white space at their ends."""
    return hide(text, forms_of(secrets))
