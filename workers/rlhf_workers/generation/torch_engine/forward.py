"""Runs a transformers causal language model for the engine: prefills prompts and decodes rows of a pool.

Rule: the model gets explicit position ids and prepared 4D masks. `verify` refuses a model whose logits show that it
ignores them. Must never depend on the cache's own idea of length.
"""

import logging
from typing import Any, Final

import numpy as np
import torch

from rlhf_common.model_files.model_limits import context_length
from rlhf_common.names import ExitCode
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.torch_engine.buckets import TILE_ROWS, length_bucket
from rlhf_workers.generation.torch_engine.kv_cache import KvPool, PromptCache
from rlhf_workers.generation.torch_engine.sample_rows import Rectangle, SampleRows, rectangle, sample_rows
from rlhf_workers.generation.torch_engine.shared_attention import (
    MOST_PADDING,
    WRITTEN_FOR,
    PlacedRectangle,
    in_place_of_its_own,
)
from rlhf_workers.models.attention_masks import FULL, SLIDING, AttentionMasks
from rlhf_workers.models.experts import has_experts, in_tiles
from rlhf_workers.models.kv_slices import KvShape

log = logging.getLogger(__name__)

VERIFY_TOKENS: Final = 24
"""Tokens of the sequence that `verify` runs."""
VERIFY_TOLERANCE: Final = {torch.float32: 2e-3, torch.float64: 2e-3}
"""Maximum difference of logits by type, relative to 1 + the largest logit; other types use HALF_TOLERANCE."""
HALF_TOLERANCE: Final = 0.1


class CausalForward:
    """One model, driven by explicit positions and masks."""

    def __init__(self, model: Any, field: str) -> None:
        """`field` is the manifest path to name when the engine cannot drive the model."""
        self.model = model
        self.device: torch.device = model.device
        config = model.config.get_text_config()
        self.vocabulary = int(config.vocab_size)
        self.max_positions: int | None = context_length(config)
        self.experts_see_others = has_experts(config) and not in_tiles(model)
        """Whether expert kernels depend on how many tokens are routed together."""
        self._field = field
        self._masks = AttentionMasks(config, model.dtype)
        if self._masks.unknown:
            why = f"it has layers of kind {', '.join(self._masks.unknown)}; the torch engine knows {FULL} and {SLIDING}"
            raise _unsupported(config, field, why)
        self.kinds, self.window = self._masks.kinds, self._masks.window
        self._shares_keys = False
        """Whether rows of one sample can read its keys together."""
        self._group = 1
        """Query heads per key head; set when sharing is tried."""
        self.kv_shapes: tuple[KvShape, ...] = ()
        """Shapes of a token's cache entries, by layer; set by `verify`."""

    @torch.inference_mode()
    def prefill(self, tokens: torch.Tensor) -> PromptCache:
        """Return keys and values of int64 [prompts, tokens] ids from position 0, right-padded with any token."""
        length = tokens.shape[1]
        positions = torch.arange(length, device=self.device)
        cache = PromptCache()
        self.model(
            input_ids=tokens,
            position_ids=positions[None].expand_as(tokens),
            attention_mask=self._masks.for_positions(positions[None], length),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return cache

    @torch.inference_mode()
    def decode(
        self, pool: KvPool, first: int, tokens: torch.Tensor, positions: torch.Tensor, length: int
    ) -> torch.Tensor:
        """Return logits [n, vocabulary] after feeding tokens [n] at positions [n] to pool rows first .. first+n-1. Keys
        0 .. length-1 are read; positions must be below `length`.
        """
        pool.point(first, positions, length)
        return self._decode(pool, tokens, positions, length)

    @torch.inference_mode()
    def decode_rows(
        self,
        pool: KvPool,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        length: int,
        shape: SampleRows | None = None,
    ) -> torch.Tensor:
        """Return logits [n, vocabulary] as `decode` does, where several of `rows` [n] may be the same row of `pool`.

        A layer writes the keys and values of all rows before it reads one. Two rows with the same pool row and position
        must be fed the same token. With a `shape` of these rows, keys may be read once per sample.
        """
        if shape is not None and self._shares_keys:
            found = rectangle(shape)
            if len(found.sources) <= MOST_PADDING * len(rows):
                return self._decode_rectangle(pool, rows, tokens, positions, length, found)
        pool.point_rows(rows, positions, length)
        return self._decode(pool, tokens, positions, length)

    def _decode_rectangle(
        self,
        pool: KvPool,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        length: int,
        shape: Rectangle,
    ) -> torch.Tensor:
        placed = PlacedRectangle.on_device(shape, self.device)
        pool.point_rows(rows, positions, length, (shape.first, shape.samples))
        asked = positions.index_select(0, placed.sources).view(shape.samples, shape.most)
        with in_place_of_its_own(self.model.config.get_text_config()):
            logits: torch.Tensor = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                attention_mask=self._masks.for_positions(asked.repeat_interleave(self._group, dim=1), length),
                past_key_values=pool,
                use_cache=True,
                rectangle=placed,
            ).logits
        return logits[0]

    def _decode(self, pool: KvPool, tokens: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
        logits: torch.Tensor = self.model(
            input_ids=tokens[:, None],
            position_ids=positions[:, None],
            attention_mask=self._masks.for_positions(positions[:, None], length),
            past_key_values=pool,
            use_cache=True,
        ).logits
        return logits[:, -1]

    def keys_read(self, length: int, capacity: int) -> int:
        """See StaticForward. Masked keys are computed too, so lengths have several steps per doubling."""
        return length_bucket(length, capacity)

    def release(self) -> None:
        """See StaticForward; nothing to release."""

    @torch.inference_mode()
    def verify(self, *, sharing: bool = False) -> None:
        """Raise WorkError ModelUnsupported if prefill and decode fail, or give other logits than a full forward pass,
        beyond `tolerance`.

        `sharing`: also find out whether rows of one sample may read its keys together.
        """
        try:
            expected, cached = self._both_ways()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise _unsupported(self.model.config, self._field, f"it does not take our masks: {error}") from error
        excluded = expected.isneginf()
        if not bool((expected.isfinite() | excluded).all()):
            raise _unsupported(self.model.config, self._field, "a full pass gives logits that are NaN or infinite")
        off = float((cached - expected).masked_fill(excluded & cached.isneginf(), 0.0).abs().max())
        allowed = tolerance(self.model.dtype) * (1 + float(expected.masked_fill(excluded, 0.0).abs().max()))
        if not off <= allowed:
            why = f"its logits with a key-value cache differ from a full pass by {off:.2g} (allowed {allowed:.2g})"
            raise _unsupported(self.model.config, self._field, why)
        if sharing and self.model.config.get_text_config()._attn_implementation == WRITTEN_FOR:
            self._shares_keys = self._try_sharing()

    def _try_sharing(self) -> bool:
        """Return whether three samples with one, three and two rows get the logits of rows that read copies, within
        `tolerance`."""
        self._group = self.model.config.get_text_config().num_attention_heads // self.kv_shapes[0].heads
        generator = np.random.Generator(np.random.Philox(key=1))
        ids = torch.from_numpy(generator.integers(0, self.vocabulary, (3, VERIFY_TOKENS))).to(self.device)
        shape, half, every = sample_rows(np.array([1, 3, 2])), VERIFY_TOKENS // 2, torch.arange(3, device=self.device)
        rows, ahead = (torch.from_numpy(part).to(self.device) for part in shape)
        positions = half + ahead + rows
        fed = rows, ids[rows, positions], positions, VERIFY_TOKENS
        pools = [KvPool(TILE_ROWS, VERIFY_TOKENS) for _ in range(2)]
        for pool in pools:
            pool.write_prompts(self.prefill(ids[:, : half + 2]), every, every)
        wanted = self.decode_rows(pools[0], *fed).float()
        try:
            found = self._decode_rectangle(pools[1], *fed, rectangle(shape)).float()
        except (TypeError, ValueError, RuntimeError) as error:
            log.info("rows of one sample read copies of its keys: %s", error)
            return False
        allowed = tolerance(self.model.dtype) * (1 + float(wanted.abs().max()))
        return float((found - wanted).abs().max()) <= allowed

    def _both_ways(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits of the second half of a random sequence, from a full pass and from prefill and decode; set
        `kv_shapes`."""
        generator = np.random.Generator(np.random.Philox(key=0))
        ids = torch.from_numpy(generator.integers(0, self.vocabulary, VERIFY_TOKENS)).to(self.device)
        half = VERIFY_TOKENS // 2
        pool = KvPool(TILE_ROWS, VERIFY_TOKENS)
        row = torch.zeros(1, dtype=torch.int64, device=self.device)
        pool.write_prompts(self.prefill(ids[None, :half]), row, row)
        cached = [
            self.decode(pool, 0, ids[at : at + 1], torch.full_like(row, at), VERIFY_TOKENS)[0].float()
            for at in range(half, VERIFY_TOKENS)
        ]
        self.kv_shapes = tuple(KvShape.from_tensors(*pool.storage[layer]) for layer in sorted(pool.storage))
        expected = self.model(input_ids=ids[None], use_cache=False).logits[0, half:].float()
        return expected, torch.stack(cached)


def tolerance(dtype: torch.dtype) -> float:
    """Return the allowed difference of logits, relative to 1 + the largest, between two ways of computing them."""
    return VERIFY_TOLERANCE.get(dtype, HALF_TOLERANCE)


def _unsupported(config: Any, field: str, why: str) -> WorkError:
    message = f"{field}: the torch engine cannot decode with this {config.model_type} model: {why}"
    return WorkError("ModelUnsupported", message, field=field, exit_code=ExitCode.BAD_MODEL)
