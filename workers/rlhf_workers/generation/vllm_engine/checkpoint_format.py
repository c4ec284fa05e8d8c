"""Weights in the names and shapes of a checkpoint, which vLLM's loader takes, from those of transformers' model.

Rule: transformers' own conversion, the one by which it writes checkpoints; most models have none, a mixture of experts
keeps all experts of a layer in one tensor and a checkpoint has them one by one. A layer at a time, so that what is
copied is one layer's.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, Final

from transformers.core_model_loading import revert_weight_conversion

from rlhf_workers.generation.vllm_engine.weight_pieces import Named

_LAYER: Final = re.compile(r".*?\.\d+(?=\.)")
"""Up to the first number in a parameter's name: its layer. The numbers of experts come after it."""


class CheckpointFormat:
    """How one model's parameters are called in checkpoints."""

    def __init__(self, model: Any) -> None:
        """`model`: of transformers, its tensors on any device."""
        self._model = model
        named = dict(model.named_parameters())
        converted = revert_weight_conversion(model, named)
        self._differs = converted.keys() != named.keys() or any(converted[name] is not named[name] for name in named)

    def converted(self, named: Iterable[Named]) -> Iterator[Named]:
        """Yield the tensors of a whole model, in the order in which they came: layer by layer where it came so."""
        if not self._differs:
            yield from named
            return
        for _, layer in groupby(named, lambda item: _layer_of(item[0])):
            yield from revert_weight_conversion(self._model, dict(layer)).items()


def _layer_of(name: str) -> str:
    found = _LAYER.match(name)
    return found.group() if found else ""
