"""Checks whether the actor and the trained models can be split as in the manifest.

Rule: it reads only config.json on this disk, also in the hub's cache.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rlhf_api.algorithms import graph_of
from rlhf_api.job import RLHFJobSpec
from rlhf_common.json_document import parse_json
from rlhf_common.names import ExitCode
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.model_folders import local_folder
from rlhf_planner.tensor_split import experts_problem, split_problem

GENERATION: Final = "spec.generation.parallelism.tensor"
TRAINING: Final = "spec.training.parallelism"


def tensor_split_problems(spec: RLHFJobSpec) -> Iterator[tuple[str, int, str]]:
    """Yield (field, its value, the reason why a model cannot be split so) of a resolved job.

    A model whose config.json is not readable here has no known problem.
    """
    generation, training = spec.generation.parallelism.tensor, spec.training.parallelism
    if generation > 1 and (problem := split_problem(_config(spec.models.actor.path), generation)):
        yield GENERATION, generation, problem
    for role in graph_of(spec).trained:
        source, degree = spec.models.source(role), training.tensor_of(role)
        whole = degree == training.expert == 1
        config = {} if source is None or whole else _config(source.path)
        if problem := split_problem(config, degree, several=False):
            field = f"{TRAINING}.{training.tensor_field(role)}"
            yield field, degree, f"{spec.models.path_field(role)}: {problem}"
        if problem := experts_problem(config, training.expert):
            yield f"{TRAINING}.expert", training.expert, f"{spec.models.path_field(role)}: {problem}"


def check_tensor_split(spec: RLHFJobSpec) -> None:
    """Raise JobError for the first model that cannot be split."""
    for field, degree, problem in tensor_split_problems(spec):
        raise JobError("DoesNotFit", f"{degree}: {problem}", field=field, exit_code=ExitCode.USAGE)


def _config(path: str) -> Mapping[str, Any]:
    folder = local_folder(path)
    try:
        config = {} if folder is None else parse_json((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
