"""Which module builds which engine: by its name in `spec.generation.engine`, or by the path of a module of your own.

A module has `build_engine(spec, tokenizer, device) -> Engine`; docs/tutorials/your-engine.md writes one. Rule:
importing this module loads no engine; a worker pays only for the one that its job names. What cannot be used is a
WorkError that names the field, the module and what is wrong.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

import torch

from rlhf_api.job import RLHFJobSpec
from rlhf_api.names import ExitCode
from rlhf_workers.failures import WorkError, describe
from rlhf_workers.generation.engine import Engine
from rlhf_workers.loading import uncollected

FIELD: Final = "spec.generation.engine"
ENGINES: Final[Mapping[str, str]] = {"torch": "rlhf_workers.generation.torch_engine.build"}
"""Name -> module."""


def build_engine(spec: RLHFJobSpec, tokenizer: Any, device: torch.device) -> Engine:
    """Return the engine that the job names, with the manifest's weights in it.

    `tokenizer` is the policy's. WorkError when there is no such engine, or when it cannot serve this job.
    """
    name = spec.generation.engine
    module = ENGINES.get(name, name)
    if name not in ENGINES and "." not in name:
        names = ", ".join(ENGINES)
        raise _unusable("EngineUnavailable", f"{name} is not available in this worker; use {names}")
    try:
        with uncollected():
            builder = import_module(module).build_engine
    except AttributeError:
        message = f"module {module} has no build_engine(spec, tokenizer, device)"
        raise _unusable("EngineUnavailable", message) from None
    except Exception as error:
        raise _unusable("EngineUnavailable", f"module {module} cannot be loaded: {describe(error)}") from error
    engine = builder(spec, tokenizer, device)
    if not isinstance(engine, Engine):
        message = f"what build_engine of {module} returns, a {type(engine).__name__}, is no Engine: {_missing(engine)}"
        raise _unusable("EngineInvalid", message)
    return engine


def _missing(engine: object) -> str:
    members = ("version", "submit", "step", "progress", "withdraw", "load_weights", "held")
    return "it lacks " + ", ".join(name for name in members if not hasattr(engine, name))


def _unusable(reason: str, message: str) -> WorkError:
    return WorkError(reason, f"{FIELD}: {message}", field=FIELD, exit_code=ExitCode.USAGE)
