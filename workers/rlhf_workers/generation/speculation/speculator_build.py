"""Builds the speculator of a job.

Rule: without speculation nothing is loaded. Must never depend on an engine, whose passes are described by numbers.
"""

from typing import Any

import torch

from rlhf_api.job import RLHFJobSpec
from rlhf_workers.generation.speculation.drafter_registry import build_drafters
from rlhf_workers.generation.speculation.speculator import Ints, Speculator


def build_speculator(spec: RLHFJobSpec, tokenizer: Any, device: torch.device, widths: Ints) -> Speculator | None:
    """Return the speculator for an engine of this job; None if speculation is Disabled.

    `tokenizer` is the policy's. `widths` as for `Speculator`. Raises WorkError with the field of an unusable drafter.
    """
    speculation = spec.generation.speculation
    if speculation.mode == "Disabled":
        return None
    drafters = build_drafters(speculation.loaded_drafters, spec, tokenizer, device)
    return Speculator(drafters, mode=speculation.mode, longest=speculation.max_tokens, widths=widths)
