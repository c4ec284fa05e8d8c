"""The speculator of a job's manifest.

Rule: without speculation nothing is loaded and nothing is asked. Must never know an engine: what it says of its passes
comes as numbers.
"""

from typing import Any

import torch

from rlhf_api.job import RLHFJobSpec
from rlhf_workers.generation.speculation.drafter_registry import build_drafters
from rlhf_workers.generation.speculation.speculator import Ints, Speculator


def build_speculator(spec: RLHFJobSpec, tokenizer: Any, device: torch.device, widths: Ints) -> Speculator | None:
    """Return what drafts for an engine of this job; None where it is Disabled.

    `tokenizer` is the policy's, `device` the one that it is decoded on; `widths` int64 [rows + 1] is how wide a pass
    over so many rows is, for as many rows as a pass may have. WorkError names the field of what cannot be.
    """
    speculation = spec.generation.speculation
    if speculation.mode == "Disabled":
        return None
    drafters = build_drafters(speculation.drafters, spec, tokenizer, device)
    return Speculator(drafters, mode=speculation.mode, longest=speculation.max_tokens, widths=widths)
