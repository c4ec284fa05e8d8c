"""Secrets of a job's reward: by which environment variable each reaches the processes that need it.

Pods that run rewards get the variables from Secrets, `rlhf run` from the environment it is started in; so a value is in
no ConfigMap, no file of ours and no message. Pure.
"""

import re
from typing import Final

from rlhf_api.job.models import Reward, SecretKey

PREFIX: Final = "RLHF_SECRET_"
"""What the variables begin with."""


def references(reward: Reward) -> tuple[SecretKey, ...]:
    """The keys of Secrets that the reward is given, each once, in the manifest's order."""
    given = [*(reward.function.env if reward.function else ()), *(reward.endpoint.headers if reward.endpoint else ())]
    return tuple(dict.fromkeys(each.secret_key_ref for each in given if each.secret_key_ref is not None))


def variables(reward: Reward) -> dict[SecretKey, str]:
    """Key -> variable, such as RLHF_SECRET_JUDGE_TOKEN for key `token` of Secret `judge`.

    Where two would have the same, the later ones are numbered.
    """
    found: dict[SecretKey, str] = {}
    for reference in references(reward):
        plain = PREFIX + re.sub(r"[^A-Z0-9]", "_", f"{reference.name}_{reference.key}".upper())
        taken, name, number = set(found.values()), plain, 2
        while name in taken:
            name, number = f"{plain}_{number}", number + 1
        found[reference] = name
    return found
