"""Attention of a pass with several rows of one sample, which reads the sample's keys once, for a model of transformers.

The model sees one sequence of all rows, so that its matrices multiply no padding, and this in place of its attention:
rows become samples by positions, and query heads that share keys are the queries of one call. Rule: a function of its
arguments, for models whose own attention is torch's kernel and nothing else (`CausalForward.verify` tries it); rounding
may differ from passes of one row a sample, so never in a deterministic job.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlhf_workers.devices.host_copies import to_device
from rlhf_workers.generation.torch_engine.sample_rows import Rectangle

NAME: Final = "rlhf_shared_keys"
"""Under which transformers finds it."""
WRITTEN_FOR: Final = "sdpa"
"""The attention that it takes the place of."""
MOST_PADDING: Final = 3
"""Times the rows of a pass: beyond, reading copies of keys costs less than queries that nobody asked."""


class PlacedRectangle(NamedTuple):
    """A `Rectangle` on the model's device."""

    first: int
    samples: int
    most: int
    sources: torch.Tensor
    places: torch.Tensor

    @classmethod
    def on_device(cls, shape: Rectangle, device: torch.device) -> "PlacedRectangle":
        """Return it there."""
        placed = (to_device(part, device) for part in (shape.sources, shape.places))
        return cls(shape.first, shape.samples, shape.most, *placed)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    rectangle: PlacedRectangle,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return [1, n, heads, size] of queries [1, heads, n, size], keys and values [samples, kv heads, keys, size] and a
    mask [samples, 1, most * group, keys]; ValueError for scores that are changed before they are weighed."""
    if softcap is not None:
        raise ValueError("scores are capped")
    heads, size = query.shape[1], query.shape[3]
    shape = rectangle.samples, rectangle.most, key.shape[1], heads // key.shape[1], size
    rows = query[0].transpose(0, 1).index_select(0, rectangle.sources).view(shape).transpose(1, 2)
    packed = rows.reshape(rectangle.samples, key.shape[1], -1, size)
    attended = scaled_dot_product_attention(packed, key, value, attn_mask=attention_mask, scale=scaling)
    places = attended.view(*rows.shape[:-1], value.shape[3]).transpose(1, 2).reshape(-1, heads, value.shape[3])
    return places.index_select(0, rectangle.places)[None], None


@contextmanager
def in_place_of_its_own(config: Any) -> Iterator[None]:
    """Inside, a model of this configuration attends by `attend`."""
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
