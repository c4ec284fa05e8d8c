"""Names, shapes and ties of a complete set of a model's weights, without the weights.

Rule: transformers' model of the folder is the reference, not vLLM's own names.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from rlhf_common.model_files.model_limits import context_length
from rlhf_common.names import ExitCode
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.engine import EngineLimits
from rlhf_workers.generation.requests import require_context
from rlhf_workers.generation.vllm_engine.weight_pieces import Named
from rlhf_workers.models.loading import generation_config, matched_weights
from rlhf_workers.weights.expert_files import as_in_files

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
"""Types in which weights may come."""


class ExpectedWeights:
    """A model's architecture on the meta device, where tensors have no memory."""

    def __init__(self, folder: str) -> None:
        """`folder` was loaded or checked before."""
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            self._model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self._model.tie_weights()
        self.generation_config = generation_config(Path(folder))
        """Generation defaults of the folder, or those that follow from its config.json."""

    @property
    def model_type(self) -> str:
        """Return the `model_type` of the text part of the configuration."""
        return str(self._model.config.get_text_config().model_type)

    @property
    def vocabulary(self) -> int:
        """Return the width of the logits."""
        return int(self._model.config.get_text_config().vocab_size)

    def cache_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of one token's keys and values in all layers."""
        config = self._model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(config.num_hidden_layers * 2 * heads * width * dtype.itemsize)

    def require_context(self, limits: EngineLimits) -> None:
        """Raise WorkError when the longest sequence does not fit the model."""
        require_context(context_length(self._model.config.get_text_config()), limits)

    def check(self, tensors: Mapping[str, torch.Tensor], *, subject: str) -> "CheckedWeights":
        """Return a complete set; WorkError that starts with `subject` for a missing, misshapen or foreign tensor, or
        one of a type not in DTYPES.
        """
        pairs = matched_weights(self._model, tensors, subject=subject)
        sources = {id(target): source for target, source in pairs}
        every = (*self._model.named_parameters(), *self._model.named_buffers())
        named = [(name, sources[id(target)]) for name, target in every if id(target) in sources]
        for name, tensor in named:
            if tensor.dtype not in DTYPES:
                message = f"{subject}: {name} is {tensor.dtype}, must be one of {', '.join(map(str, DTYPES))}"
                raise WorkError("WeightsMismatch", message, exit_code=ExitCode.BAD_MODEL)
        parts = (part for parameter in named for part in as_in_files(*parameter, self.model_type))
        return CheckedWeights(sum(tensor.nbytes for _, tensor in named), parts)


@dataclass(frozen=True)
class CheckedWeights:
    """A complete set of a model's weights."""

    bytes: int
    named: Iterable[Named]
    """(name, tensor) under the names of a folder's files, which vLLM's loader takes; can be read once."""
