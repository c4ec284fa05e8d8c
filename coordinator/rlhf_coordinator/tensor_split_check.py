"""Whether the policy can be split as the manifest says: asked before a worker with several GPUs loads anything.

Rule: reads config.json of a folder on this disk, and of no other model; what cannot be read there is left to the
workers, who report it by its own name.
"""

import json
from typing import Final

from rlhf_api.job import RLHFJobSpec
from rlhf_api.names import ExitCode
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.model_folders import local_folder
from rlhf_planner.tensor_split import split_problem

FIELD: Final = "spec.generation.parallelism.tensor"


def tensor_split_problem(spec: RLHFJobSpec) -> str:
    """Return why the policy of a resolved job cannot be split over the devices of a worker; empty when it can."""
    degree = spec.generation.parallelism.tensor
    folder = local_folder(spec.models.actor.path) if degree > 1 else None
    if folder is None:
        return ""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return ""
    return split_problem(config, degree) if isinstance(config, dict) else ""


def check_tensor_split(spec: RLHFJobSpec) -> None:
    """Raise JobError when the policy cannot be split."""
    if problem := tensor_split_problem(spec):
        degree = spec.generation.parallelism.tensor
        raise JobError("DoesNotFit", f"{degree}: {problem}", field=FIELD, exit_code=ExitCode.USAGE)
