"""Table of the modules that build the drafters of `spec.generation.speculation.drafters`.

A module has `build_drafter(spec, tokenizer, device) -> Drafter`. Rule: importing this module loads no drafter.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Final

import torch

from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.groups import AHEAD
from rlhf_workers.generation.speculation.drafter import Drafter

DRAFTERS: Final[Mapping[str, str]] = {
    "Siblings": "rlhf_workers.generation.speculation.siblings",
    "Ngram": "rlhf_workers.generation.speculation.ngram",
    "Model": "rlhf_workers.generation.speculation.model",
    AHEAD: "rlhf_workers.generation.speculation.ahead",
}
"""Module by name."""


def build_drafters(names: Sequence[str], spec: RLHFJobSpec, tokenizer: Any, device: torch.device) -> list[Drafter]:
    """Return the drafters of these names, in order.

    `tokenizer` and `device` are the policy's. Raises WorkError with the field of an unusable drafter.
    """
    return [import_module(DRAFTERS[name]).build_drafter(spec, tokenizer, device) for name in names]
