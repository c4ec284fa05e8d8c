"""Which module builds which drafter: by its name in `spec.generation.speculation.drafters`.

A module has `build_drafter(spec, tokenizer, device) -> Drafter`. To add one: a module beside this one and a line here,
and its name among the manifest's. Rule: importing this module loads no drafter; a worker pays only for those that its
job names.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Final

import torch

from rlhf_api.job import RLHFJobSpec
from rlhf_workers.generation.speculation.drafter import Drafter

DRAFTERS: Final[Mapping[str, str]] = {
    "Siblings": "rlhf_workers.generation.speculation.siblings",
    "Ngram": "rlhf_workers.generation.speculation.ngram",
    "Model": "rlhf_workers.generation.speculation.model",
}
"""Name -> module."""


def build_drafters(names: Sequence[str], spec: RLHFJobSpec, tokenizer: Any, device: torch.device) -> list[Drafter]:
    """Return the drafters of these names, in order.

    `tokenizer` is the policy's, `device` the one that it is decoded on. WorkError names the field of what cannot be.
    """
    return [import_module(DRAFTERS[name]).build_drafter(spec, tokenizer, device) for name in names]
