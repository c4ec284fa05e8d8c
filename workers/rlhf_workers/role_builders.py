"""Table of the modules that build the roles, imported when the command arrives.

Rule: importing this module loads no engine, no trainer and no transformers.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Final

import torch

from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_workers.loading import uncollected
from rlhf_workers.worker_role import WorkerRole

Builder = Callable[[RLHFJob, pb.Command, torch.device, Path | None], WorkerRole]

BUILDERS: Final = {
    "become_generation": "rlhf_workers.generation.generation_role",
    "become_inference": "rlhf_workers.inference.inference_role",
    "become_training": "rlhf_workers.training.training_role",
}
"""Module with `build(job, command, device, certificates) -> WorkerRole`, by command of the oneof."""


def build_role(job: RLHFJob, command: pb.Command, device: torch.device, certificates: Path | None) -> WorkerRole:
    """Return the role that a Become* command asks for."""
    with uncollected():
        module = import_module(BUILDERS[str(command.WhichOneof("command"))])
    builder: Builder = module.build
    return builder(job, command, device, certificates)
