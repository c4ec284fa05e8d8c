"""Judges responses with a causal language model on inference workers, from its next-token probabilities.

Rule: each question is a separate pass, so answers do not depend on each other. Must never return a number when the
judge gives the answers almost no probability.
"""

import logging
from collections.abc import Sequence
from itertools import combinations
from typing import Any, Final

import numpy as np
import torch

from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.judge import Judge
from rlhf_common.model_files.text_tokens import prompt_tokens
from rlhf_common.names import ExitCode
from rlhf_common.samples import FloatArray, ScoringSample
from rlhf_common.undated_chats import render_undated
from rlhf_workers.devices.host_copies import to_device
from rlhf_workers.failures import WorkError
from rlhf_workers.inference.group_comparisons import Comparing
from rlhf_workers.inference.model_scorer import scoring_attention
from rlhf_workers.inference.rewards.judge_answers import (
    UnaskableError,
    UnreadableAnswerError,
    label_of,
    mean_wins,
    of_both_orders,
    question,
    worth,
)
from rlhf_workers.inference.rewards.model_text import PROBE
from rlhf_workers.models import loading as models
from rlhf_workers.models.precision import compute_dtype

log = logging.getLogger(__name__)

POSITIONS: Final = 1 << 30
"""Maximum positions of a model whose configuration names none."""


def load(
    judge: Judge, field: str, spec: RLHFJobSpec, device: torch.device, home: torch.device
) -> "JudgeModelScorer | JudgeModelComparer":
    """Return the scorer of a judge's model, loaded on `home`; `field` is the judge's manifest field.

    Raises WorkError when it cannot be loaded, has no token for an answer, or its template is unusable.
    """
    assert judge.model is not None
    path = f"{field}.model.path"
    dtype, attention = compute_dtype(spec), scoring_attention(spec)
    model = models.load_causal_lm(judge.model.path, field=path, dtype=dtype, device=home, attention=attention)
    kind = JudgeModelComparer if judge.method == "Pairwise" else JudgeModelScorer
    tokenizer = models.load_tokenizer(judge.model.path, path)
    how = "by its own chat template" if tokenizer.chat_template else "as plain text, as it has no chat template"
    log.info("%s: %s reads questions %s", path, judge.model.path, how)
    return kind(judge, model, tokenizer, device, path)


class _JudgeModel:
    """A model that answers questions."""

    frozen = True

    def __init__(self, judge: Judge, model: Any, tokenizer: Any, device: torch.device, field: str) -> None:
        """`field` is the manifest field of the model's path."""
        self.model = model
        self._judge, self._tokenizer, self._device, self._field = judge, tokenizer, device, field
        self._longest = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or POSITIONS)
        vocabulary = int(model.config.get_text_config().vocab_size)
        ids: dict[str, list[int]] = {label: [] for label in judge.labels}
        for token, index in tokenizer.get_vocab().items():
            if (label := label_of(token)) in ids and index < vocabulary:
                ids[label].append(index)
        self._ids = {label: sorted(of_label) for label, of_label in ids.items()}
        if tokenizer.chat_template:
            self._try_template()
        if missing := [label for label, of_label in self._ids.items() if not of_label]:
            message = f"{field}: its tokenizer has no token for {', '.join(missing)}; use other ratings"
            raise WorkError("ModelUnsupported", message, field=field, exit_code=ExitCode.BAD_MODEL)

    def _try_template(self) -> None:
        """Raise WorkError for a template that fails, omits the question, or depends on the date or on chance."""
        try:
            why = "" if PROBE in _rendered(self._tokenizer, PROBE) else "the chat template omits the question"
        except Exception as error:  # templates are user data and may raise anything
            why = str(error)
        if why:
            message = f"{self._field}: {why}"
            raise WorkError("ModelUnsupported", message, field=self._field, exit_code=ExitCode.BAD_MODEL)

    @torch.inference_mode()
    def _ask(self, sample: ScoringSample, **responses: str) -> float:
        """Return the value of the answer to a question about a sample; WorkError names the sample."""
        try:
            ids = self._tokens(question(self._judge, sample, **responses))
        except UnaskableError as error:
            raise self._unrated(sample, str(error)) from error
        if len(ids) > self._longest:
            raise self._unrated(sample, f"its question has {len(ids)} tokens, the judge takes {self._longest}")
        tokens = to_device(np.array([ids], np.int64), self._device)
        logits = self.model(input_ids=tokens, use_cache=False).logits[0, -1].float()
        probabilities = torch.softmax(logits, dim=-1).cpu().double()
        by_label = {label: float(probabilities[of_label].sum()) for label, of_label in self._ids.items()}
        try:
            return worth(self._judge, by_label)
        except UnreadableAnswerError as error:
            raise self._unrated(sample, str(error)) from error

    def _tokens(self, text: str) -> list[int]:
        if self._tokenizer.chat_template:
            rendered = _rendered(self._tokenizer, text)
            return list(self._tokenizer(rendered, add_special_tokens=False)["input_ids"])
        return prompt_tokens(self._tokenizer, [text])[0]

    def _unrated(self, sample: ScoringSample, why: str) -> WorkError:
        where = f"sample {sample.key.sample} of iteration {sample.key.iteration}"
        return WorkError("RewardInvalid", f"{where}: {why}", field=self._field, exit_code=ExitCode.USER_CODE)


def _rendered(tokenizer: Any, text: str) -> str:
    return render_undated(tokenizer, [{"role": "user", "content": text}], add_generation_prompt=True)


class JudgeModelScorer(_JudgeModel):
    """Scores a sample as its expected rating, float32 [1]."""

    def score(self, samples: Sequence[ScoringSample]) -> list[FloatArray]:
        """Return the rating of each response; WorkError names a sample without one."""
        ratings = [self._ask(sample, response=sample.response_text) for sample in samples]
        return [np.array([rating], np.float32) for rating in ratings]


class JudgeModelComparer(_JudgeModel):
    """Scores a response by its mean probability, 0..1, of being better than another one; float32 [1]."""

    def compare(self, samples: Sequence[ScoringSample]) -> Comparing:
        """Compare every pair of responses in two passes, and yield after each pair; WorkError names the sample."""
        better: dict[tuple[int, int], float] = {}
        for first, other in combinations(range(len(samples)), 2):
            better[first, other] = self._first_is_better(samples[first], samples[other])
            yield
        rewards = mean_wins(len(samples), better)
        return [None if reward is None else np.array([reward], np.float32) for reward in rewards]

    def _first_is_better(self, sample: ScoringSample, other: ScoringSample) -> float:
        texts = sample.response_text, other.response_text
        as_first = self._ask(sample, first=texts[0], second=texts[1])
        as_second = self._ask(sample, first=texts[1], second=texts[0])
        return of_both_orders(as_first, as_second)
