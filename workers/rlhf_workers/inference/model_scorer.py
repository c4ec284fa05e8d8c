"""Scores samples with a causal language model: log-probabilities of response tokens, and critic values.

Both are read at the position *before* each response token (prompt + t - 1). Rule: in a deterministic job a sample is
computed alone, with eager attention, so its scores do not depend on other samples. Must never return a number that is
not finite: that is a failure of the sample.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from rlhf_api.job import RLHFJobSpec
from rlhf_common.samples import FloatArray, ScoringSample
from rlhf_workers.devices.host_copies import to_device
from rlhf_workers.failures import WorkError
from rlhf_workers.inference.chunk_forward import ChunkForward
from rlhf_workers.inference.partial_scores import PartialScore
from rlhf_workers.inference.token_scores import TokenScores
from rlhf_workers.losses.log_probabilities import selected_log_probabilities
from rlhf_workers.models.loading import Attention, ValueModel

PAD: Final = 16
"""Padding unit in tokens."""
HEAD_BYTES: Final = 256 * 1024 * 1024
"""Maximum bytes of float32 logits that are read at once; those of PAD positions may be more."""
HEAD_TOLERANCE: Final = 2e-2
"""Relative difference that is allowed between the model's logits and those of its backbone and head."""


class ModelScorer(Protocol):
    """Scores a batch on the compute thread, with its model onloaded.

    A scorer that can start with unfinished samples is a `TokenScorer`.
    """

    model: Any
    frozen: bool
    """Whether the model keeps the weights of its folder."""

    def score(self, samples: Sequence[ScoringSample]) -> list[FloatArray]:
        """Return one float32 array per sample, in order."""


def scoring_attention(spec: RLHFJobSpec) -> Attention:
    """Return the attention of scoring models: eager if scores must be reproducible, else the fused kernel."""
    return "eager" if spec.deterministic else "sdpa"


def padded_ids(samples: Sequence[ScoringSample]) -> npt.NDArray[np.int64]:
    """Return ids [batch, L], right-padded with 0 to a multiple of PAD. No mask is needed: attention is causal."""
    longest = max(sample.length for sample in samples)
    ids = np.zeros((len(samples), -(-longest // PAD) * PAD), dtype=np.int64)
    for row, sample in zip(ids, samples, strict=True):
        row[: len(sample.prompt)] = sample.prompt
        row[len(sample.prompt) : sample.length] = sample.response
    return ids


def check_ids(ids: npt.NDArray[Any], vocabulary: int) -> None:
    """Raise WorkError when a token id is outside the model's vocabulary, as with a wrong tokenizer."""
    largest = int(ids.max())
    if largest >= vocabulary:
        problem = f"token id {largest} is outside the model's vocabulary of {vocabulary}: is its tokenizer another one?"
        raise WorkError("SampleInvalid", problem)


class TokenScorer(ABC):
    """Scores tokens of whole or unfinished samples; `quantity` names a number in messages."""

    frozen = True
    quantity = ""

    def __init__(self, model: Any, device: torch.device) -> None:
        """`device` is the device that scores."""
        self.model = model
        self._device = device
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        self.chunks: TokenScores | None = None
        """Chunked scoring; None for a model that can only score whole samples."""

    @torch.inference_mode()
    def score(self, samples: Sequence[ScoringSample]) -> list[FloatArray]:
        """Return float32 [n] per sample: one number per response token."""
        if self.chunks is not None and self.chunks.blocks:
            return [self.finish([sample], [PartialScore(prompt=len(sample.prompt))])[0] for sample in samples]
        ids = padded_ids(samples)
        check_ids(ids, self.vocabulary)
        numbers = self._whole(to_device(ids, self._device), samples)
        return finite_each(numbers, self.quantity, samples)

    @torch.inference_mode()
    def finish(self, samples: Sequence[ScoringSample], prefixes: Sequence[PartialScore]) -> list[FloatArray]:
        """Return what `score` returns, for samples with a prefix each; without blocks it may differ by rounding.

        The prefixes are consumed.
        """
        chunks, tokens = self.chunks, [sample.tokens for sample in samples]
        assert chunks is not None
        for ids in tokens:
            check_ids(ids, self.vocabulary)
        rows = list(range(len(samples)))
        while rows := [row for row in rows if chunks.next_chunk(prefixes[row], tokens[row], True)]:
            together = rows[:1] if chunks.blocks else rows
            chunks.advance([prefixes[row] for row in together], [tokens[row] for row in together], ended=True)
        return finite_each([torch.cat(prefix.scores) for prefix in prefixes], self.quantity, samples)

    @abstractmethod
    def _whole(self, ids: torch.Tensor, samples: Sequence[ScoringSample]) -> list[torch.Tensor]:
        """Return the numbers of samples whose padded ids [batch, L] go through the model in one pass."""

    @abstractmethod
    def _read(self, said: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return float32 [n] from the model's outputs at n positions [n, ...] and the next tokens, int64 [n]."""

    def _chunked(self, run: Any, dtype: torch.dtype, result: str, *, blocks: bool) -> TokenScores | None:
        """Return chunked scoring with `run`, the model or its backbone, if its outputs agree in chunks; else None."""
        forward = ChunkForward(run, self.model.config.get_text_config(), dtype, result)
        return TokenScores(forward, self._read, self._device, blocks=blocks) if forward.agrees() else None


class LogProbabilityScorer(TokenScorer):
    """Log-probabilities of response tokens under a frozen model, at the temperature of the sampling distribution."""

    quantity = "log-probability"

    def __init__(self, model: Any, temperature: float, device: torch.device, *, blocks: bool = False) -> None:
        """`temperature` is that of the job's rollout; 0 counts as 1. `blocks`: required in deterministic jobs."""
        super().__init__(model, device)
        self._temperature = temperature
        self._cap: float | None = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        self._split = self._head_alone_agrees()
        run, result = (model.base_model, "last_hidden_state") if self._split else (model, "logits")
        self.chunks = self._chunked(run, model.base_model.dtype, result, blocks=blocks)

    def _whole(self, ids: torch.Tensor, samples: Sequence[ScoringSample]) -> list[torch.Tensor]:
        spans = [slice(len(sample.prompt), sample.length) for sample in samples]
        before = [slice(span.start - 1, span.stop - 1) for span in spans]
        if not self._split:
            logits = self.model(input_ids=ids, use_cache=False).logits
            rows = zip(logits, before, ids, spans, strict=True)
            return [self._read(said[at], row[own]) for said, at, row, own in rows]
        hidden = torch.cat([said[at] for said, at in zip(self._backbone(ids), before, strict=True)])
        targets = torch.cat([row[own] for row, own in zip(ids, spans, strict=True)])
        return list(self._read(hidden, targets).split([len(sample.response) for sample in samples]))

    def _read(self, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        rows = max(PAD, HEAD_BYTES // (4 * self.vocabulary))
        parts = [
            selected_log_probabilities(
                self._logits(states[start : start + rows]) if self._split else states[start : start + rows],
                targets[start : start + rows],
                self._temperature,
            )[0]
            for start in range(0, len(targets), rows)
        ]
        return torch.cat(parts)

    def _backbone(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # type: ignore[no-any-return]

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.get_output_embeddings()(hidden)
        return torch.tanh(logits / self._cap) * self._cap if self._cap else logits

    @torch.inference_mode()
    def _head_alone_agrees(self) -> bool:
        """Return whether the model is its backbone, head and soft cap; some models scale their logits."""
        ids = torch.arange(PAD, device=getattr(self.model, "device", self._device))[None] % self.vocabulary
        whole = self.model(input_ids=ids, use_cache=False).logits.float()
        split = self._logits(self._backbone(ids)).float()
        allowed = HEAD_TOLERANCE * (1 + float(whole.abs().max()))
        return split.shape == whole.shape and float((split - whole).abs().max()) <= allowed


class ValueScorer(TokenScorer):
    """Critic values along the response: V of the state in which each token is sampled."""

    frozen = False
    quantity = "value"

    def __init__(self, model: ValueModel, device: torch.device, *, blocks: bool = False) -> None:
        super().__init__(model, device)
        self.chunks = self._chunked(model.backbone, model.backbone.dtype, "last_hidden_state", blocks=blocks)

    def _whole(self, ids: torch.Tensor, samples: Sequence[ScoringSample]) -> list[torch.Tensor]:
        values = self.model(ids)
        return [row[len(sample.prompt) - 1 : sample.length - 1] for row, sample in zip(values, samples, strict=True)]

    def _read(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.model.value_head(hidden)
        return values.squeeze(-1).float()


def finite_each(scores: Sequence[torch.Tensor], quantity: str, samples: Sequence[ScoringSample]) -> list[FloatArray]:
    """Check several samples as `finite` does, with one copy to the host."""
    if not scores:
        return []
    together = torch.cat([numbers.float() for numbers in scores]).cpu().numpy()
    ends = np.cumsum([len(numbers) for numbers in scores])[:-1]
    return [finite(part, quantity, sample) for part, sample in zip(np.split(together, ends), samples, strict=True)]


def finite(array: FloatArray, quantity: str, sample: ScoringSample) -> FloatArray:
    """Return the scores of a sample if all are finite; else WorkError ModelNotFinite names the position."""
    bad = np.flatnonzero(~np.isfinite(array))
    if len(bad):
        where = f"sample {sample.key.sample} of iteration {sample.key.iteration}, token {bad[0]}"
        raise WorkError("ModelNotFinite", f"{quantity} is {array[bad[0]]} at {where}: the model's weights or precision")
    return array
