"""Attention that reads a sample's keys once, for passes with several rows of one sample, as a transformers function.

Rule: it is for models whose attention is torch's kernel and nothing else (`CausalForward.verify` tries it). Must never
run in a deterministic job.
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
"""Name in transformers' registry."""
WRITTEN_FOR: Final = "sdpa"
"""The attention that it replaces."""
MOST_PADDING: Final = 3
"""Maximum elements per row of the pass; beyond, each row reads a copy of its keys."""


class PlacedRectangle(NamedTuple):
    """A `Rectangle` on the model's device."""

    first: int
    samples: int
    most: int
    sources: torch.Tensor
    places: torch.Tensor

    @classmethod
    def on_device(cls, shape: Rectangle, device: torch.device) -> "PlacedRectangle":
        """Copy a rectangle to a device."""
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
    """Return [1, n, heads, size]; ValueError for capped scores.

    Queries are [1, heads, n, size], keys and values [samples, kv heads, keys, size], the mask [samples, 1, most *
    group, keys].
    """
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
    """Use `attend` inside, for models of this configuration."""
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
