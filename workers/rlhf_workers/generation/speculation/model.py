"""Drafts with a small model, token by token: with the uniform of the policy's token, or greedily.

Rule: the draft model draws with `generation.sampling` and the sample's own key.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from rlhf_api.job import RLHFJobSpec
from rlhf_common.model_files.vocabularies import difference
from rlhf_common.names import DRAFT_MODEL_FIELD, ExitCode
from rlhf_common.samples import SampleKey, SampleRequest, TokenArray
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.engine import EngineLimits, SamplingParameters
from rlhf_workers.generation.sampling import WORDS_PER_BLOCK, marked, sample, scaled, uniforms
from rlhf_workers.generation.speculation.draft_cache import DraftCache
from rlhf_workers.generation.speculation.drafter import MATCHES, MAX_DRAFT, Draft, DraftRequest
from rlhf_workers.generation.speculation.vocabulary import policy_vocabulary
from rlhf_workers.models.attention_masks import AttentionMasks
from rlhf_workers.models.loading import load_causal_lm, load_tokenizer, replace_weights
from rlhf_workers.models.precision import compute_dtype

WIDE: Final = 2 * MAX_DRAFT
"""Missing tokens above which a sample gets a separate pass."""
FADE: Final = 0.98
"""Decay of both counts of right guesses per guess in which the two rules differed: about the last fifty matter."""
NOTHING: Final = Draft(np.empty(0, np.int32), 0)
_FIRST_ROWS: Final = 4
_FIRST_CAPACITY: Final = 128


class _Row:
    """A sample's row of the cache."""

    __slots__ = ("drawing", "fed", "number", "open", "random_key", "uniforms")

    def __init__(self, number: int, request: SampleRequest) -> None:
        self.number = number
        self.random_key, self.drawing = request.random_key, request.drawing
        self.fed: TokenArray = np.empty(0, np.int32)
        """Tokens whose keys and values are in the row, from position 0."""
        self.uniforms = np.empty(0)
        """`marked` uniforms of the first response positions, at least as many as needed so far."""
        self.open = (0, 0, 0)
        """(position in the text, drawn token, most probable token) of the last guess, until it is judged."""

    def common_prefix(self, text: TokenArray) -> int:
        """Return how many tokens at the start of `text` need not be fed; the last token is always fed."""
        count = min(len(self.fed), len(text) - 1)
        differs = np.flatnonzero(self.fed[:count] != text[:count])
        return int(differs[0]) if differs.size else count

    def uniform(self, position: int) -> float:
        """Return the `marked` uniform of a response position."""
        if position >= len(self.uniforms):
            count = max(64, 2 * (position + WORDS_PER_BLOCK)) // WORDS_PER_BLOCK * WORDS_PER_BLOCK
            self.uniforms = marked(uniforms(self.random_key, 0, count), self.drawing)
        return float(self.uniforms[position])


class ModelDrafter:
    """The drafter `Model`."""

    name = "Model"

    def __init__(self, model: Any, sampling: SamplingParameters, limits: EngineLimits, vocabulary: int) -> None:
        """`vocabulary` is the width of the policy's logits; tokens beyond it are not drafted."""
        self._model, self._sampling, self._vocabulary = model, sampling, vocabulary
        self._device: torch.device = model.device
        self._words = int(model.get_input_embeddings().num_embeddings)
        self._masks = AttentionMasks(model.config.get_text_config(), model.dtype)
        self._rows_at_most = limits.max_batch_size
        self._longest_text = limits.max_prompt_tokens + limits.max_response_tokens
        self._cache = DraftCache(min(_FIRST_ROWS, self._rows_at_most), min(_FIRST_CAPACITY, self._longest_text))
        self._rows: dict[SampleKey, _Row] = {}
        self._free = list(range(self._rows_at_most))[::-1]
        self._right = [0.0, 0.0]
        """Decayed counts of right guesses, for the drawn token and the most probable one, where they differed."""

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is guessed, because it was right more often than the drawn one."""
        return self._right[1] > self._right[0]

    def begin(self, request: SampleRequest) -> None:
        """Assign a row to the sample, if one is free."""
        if request.key not in self._rows and self._free:
            self._rows[request.key] = _Row(self._free.pop(), request)

    def extend(self, key: SampleKey, tokens: TokenArray) -> None:
        """Do nothing: the text comes with every request."""

    def end(self, key: SampleKey) -> None:
        """Release the row."""
        row = self._rows.pop(key, None)
        if row is not None:
            self._free.append(row.number)
            self._free.sort(reverse=True)  # low rows first, so that used rows are mostly adjacent

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Replace all weights; return bytes. Tokens are fed again. Raises WorkError WeightsMismatch before any
        change."""
        replaced = replace_weights(self._model, tensors, subject="draft model")
        for row in self._rows.values():
            row.fed = np.empty(0, np.int32)
        return replaced

    @torch.inference_mode()
    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return the model's next tokens, or none; `match` is the class of the first token's probability."""
        drafts = [NOTHING] * len(requests)
        asked = [
            (place, request, self._rows[request.key], min(request.longest, self._longest_text - len(request.tokens)))
            for place, request in enumerate(requests)
            if request.key in self._rows and int(request.tokens.max()) < self._words
        ]
        asked = sorted((entry for entry in asked if entry[3] > 0), key=lambda entry: entry[2].number)
        if not asked:
            return drafts
        texts = [request.tokens for _, request, _, _ in asked]
        rows = [row for _, _, row, _ in asked]
        starts = [len(request.tokens) - request.prompt_length for _, request, _, _ in asked]
        guesses, certain = self._guess(texts, rows, starts, max(longest for *_, longest in asked))
        for (place, _, _, longest), tokens, share in zip(asked, guesses, certain, strict=True):
            drafts[place] = Draft(tokens[:longest], min(int(share * MATCHES), MATCHES - 1))
        return drafts

    def _guess(
        self, texts: list[TokenArray], rows: list[_Row], starts: list[int], longest: int
    ) -> tuple[TokenArray, list[float]]:
        """Return int32 [rows, longest] and the first tokens' probabilities; `starts`: response tokens before them."""
        self._learn_rule(rows, texts)
        logits = self._catch_up(texts, rows)
        drawn: list[torch.Tensor] = []
        certain: list[float] = []
        numbers = torch.tensor([row.number for row in rows], device=self._device)
        ends = torch.tensor([len(text) for text in texts], device=self._device)
        for step in range(longest):
            if drawn:
                logits = self._pass(numbers, drawn[-1][:, None], (ends + step - 1)[:, None])[:, 0]
            uniform = [row.uniform(start + step) for row, start in zip(rows, starts, strict=True)]
            at = torch.tensor(uniform, dtype=torch.float64, device=self._device)
            coupled, likeliest, shares = self._draw(logits[:, : self._vocabulary], at)
            if not drawn:
                certain = shares.tolist()
                firsts = zip(rows, texts, coupled.tolist(), likeliest.tolist(), strict=True)
                for row, text, first, other in firsts:
                    row.open = (len(text), first, other)
            drawn.append(likeliest if self.greedy else coupled)
        guesses = torch.stack(drawn, dim=1).to("cpu", torch.int32).numpy()
        for row, text, guess in zip(rows, texts, guesses, strict=True):
            row.fed = np.concatenate([text, guess[:-1]])
        return guesses, certain

    def _draw(self, logits: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draw after logits [n, vocabulary].

        Return the tokens [n] that the uniforms draw, the most probable ones [n], and the probabilities [n] of the
        guesses.
        """
        drawn, log_probabilities = sample(logits, uniform, self._sampling)
        most, likeliest = torch.softmax(scaled(logits, uniform, self._sampling), dim=-1).max(dim=-1)
        return drawn, likeliest, most if self.greedy else log_probabilities.exp()

    def _learn_rule(self, rows: Sequence[_Row], texts: Sequence[TokenArray]) -> None:
        """Count which of the two rules was right in the last guess of each row, if they differed."""
        for row, text in zip(rows, texts, strict=True):
            at, drawn, likeliest = row.open
            if drawn != likeliest and at < len(text):
                self._right = [
                    FADE * count + (text[at] == token)
                    for count, token in zip(self._right, (drawn, likeliest), strict=True)
                ]
            row.open = (0, 0, 0)

    def _catch_up(self, texts: list[TokenArray], rows: list[_Row]) -> torch.Tensor:
        """Feed the missing tokens of each row; return the logits [rows, vocabulary] after the texts' last tokens."""
        prefixes = [row.common_prefix(text) for row, text in zip(rows, texts, strict=True)]
        few = [place for place, text in enumerate(texts) if len(text) - prefixes[place] <= WIDE]
        batches = [few] if few else []
        batches += [[place] for place in range(len(texts)) if place not in set(few)]
        result: dict[int, torch.Tensor] = {}
        for batch in batches:
            lacking = [texts[place][prefixes[place] :] for place in batch]
            width = max(map(len, lacking))
            fed = np.zeros((len(batch), width), np.int64)
            positions = np.array([prefixes[place] for place in batch])[:, None] + np.arange(width)
            for line, tokens in enumerate(lacking):
                fed[line, : len(tokens)] = tokens
            numbers = torch.tensor([rows[place].number for place in batch], device=self._device)
            logits = self._pass(
                numbers, torch.from_numpy(fed).to(self._device), torch.from_numpy(positions).to(self._device)
            )
            result.update((place, logits[line, len(lacking[line]) - 1]) for line, place in enumerate(batch))
        return torch.stack([result[place] for place in range(len(texts))])

    def _pass(self, numbers: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return logits [n, q, vocabulary] after tokens [n, q] at positions [n, q] of rows `numbers` [n], ascending."""
        length = int(positions.max()) + 1
        if length > self._cache.capacity or int(numbers[-1]) >= self._cache.rows:
            capacity = max(length, min(2 * length, self._longest_text + WIDE))
            rows = max(int(numbers[-1]) + 1, min(2 * int(numbers[-1]) + 2, self._rows_at_most))
            self._cache.grow(rows, capacity)
        self._cache.point(numbers, positions, length)
        logits: torch.Tensor = self._model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=self._masks.for_positions(positions, length),
            past_key_values=self._cache,
            use_cache=True,
        ).logits
        return logits


def build_drafter(spec: RLHFJobSpec, tokenizer: Any, device: torch.device) -> ModelDrafter:
    """Return the drafter with the manifest's draft model; WorkError if it cannot draft for this policy."""
    draft_model = spec.generation.speculation.draft_model
    if draft_model is None:
        raise _unusable("is not set, and the drafter Model needs it: name a Hugging Face folder")
    path, dtype, limits = draft_model.path, compute_dtype(spec), EngineLimits.from_spec(spec)
    if problem := difference(load_tokenizer(path, DRAFT_MODEL_FIELD).get_vocab(), tokenizer.get_vocab()):
        raise _unusable(f"{path}: {problem}; a draft model has the policy's tokenizer")
    model = load_causal_lm(path, field=DRAFT_MODEL_FIELD, dtype=dtype, device=device, attention="sdpa")
    config = model.config.get_text_config()
    longest, positions = limits.max_prompt_tokens + limits.max_response_tokens, config.max_position_embeddings
    if positions is not None and longest > positions:
        raise _unusable(
            f"{path} has {positions} positions (max_position_embeddings), and spec.rollout.maxPromptTokens "
            f"{limits.max_prompt_tokens} + maxResponseTokens {limits.max_response_tokens} is {longest}"
        )
    if unknown := AttentionMasks(config, model.dtype).unknown:
        raise _unusable(f"{path} has layers of kind {', '.join(unknown)}, which no drafter knows")
    return ModelDrafter(model, SamplingParameters.from_spec(spec), limits, policy_vocabulary(spec))


def _unusable(message: str) -> WorkError:
    return WorkError(
        "DraftModelUnusable", f"{DRAFT_MODEL_FIELD}: {message}", field=DRAFT_MODEL_FIELD, exit_code=ExitCode.BAD_MODEL
    )
