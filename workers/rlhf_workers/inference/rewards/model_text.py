"""Renders conversations for a reward model with its own tokenizer and chat template.

Its chat template renders the prompt's messages with the response as the assistant's message.
"""

import json
import logging
from pathlib import Path
from typing import Any, Final

import numpy as np

from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.rollout import Prompts
from rlhf_common.chats import tools_of
from rlhf_common.model_files.text_tokens import added_tokens, prompt_tokens
from rlhf_common.names import ExitCode
from rlhf_common.samples import FIRST_EVALUATION_SAMPLE, ScoringSample, TokenArray
from rlhf_common.undated_chats import render_undated
from rlhf_workers.failures import WorkError

log = logging.getLogger(__name__)

PROBE: Final = "probe"
"""Text for trying out a template."""


class OwnTokenizer:
    """A reward model's tokenizer and template."""

    def __init__(self, tokenizer: Any, spec: RLHFJobSpec, field: str) -> None:
        """`field` is the reward model's manifest field. Raises WorkError if prompts need a template and it has none, or
        its template depends on the date or on chance.
        """
        self._tokenizer, self._field = tokenizer, field
        self._trained, self._evaluated = _prompts(spec)
        for prompts in (self._trained, self._evaluated):
            if prompts.chat_template and not tokenizer.chat_template:
                message = (
                    f"{field}: its tokenizer differs from the actor's and has no chat template, but "
                    f"{prompts.field}.chatTemplate is true; add the template it was trained with to its folder"
                )
                raise WorkError("ModelUnsupported", message, field=field, exit_code=ExitCode.BAD_MODEL)
        self._warned = set[str]()
        """Roles and tools for which the log has said that the template omits or changes them."""
        self._closes = bool(tokenizer.chat_template) and self._ends_turns()

    def tokens(self, sample: ScoringSample) -> TokenArray:
        """Return int32 [n >= 1] of prompt and response.

        Raises WorkError SampleInvalid for empty text and for a conversation that the template refuses.
        """
        prompts = self._evaluated if sample.key.sample >= FIRST_EVALUATION_SAMPLE else self._trained
        ids = self._chat(sample, prompts) if prompts.chat_template else self._plain(sample)
        if not ids:
            raise self._invalid(sample, "has no text for the reward model")
        return np.asarray(ids, np.int32)

    def _plain(self, sample: ScoringSample) -> list[int]:
        [ids] = prompt_tokens(self._tokenizer, [sample.prompt_text + sample.response_text])
        return self._ended([*ids, *added_tokens(self._tokenizer).end]) if ids else ids

    def _chat(self, sample: ScoringSample, prompts: Prompts) -> list[int]:
        record = json.loads(sample.record)
        messages, tools = prompts.conversation(record[prompts.prompt_key]), tools_of(record)
        messages.append({"role": "assistant", "content": sample.response_text})
        try:
            text = render_undated(self._tokenizer, messages, tools=tools or None)
        except Exception as error:  # templates are user data and may raise anything
            raise self._invalid(sample, f"is refused by the chat template of {self._field}: {error}") from error
        lost = [message["role"] for message in messages if message["content"].strip() not in text]
        lost += ["tools"] if tools and text == render_undated(self._tokenizer, messages) else []
        for part in {*lost} - self._warned:
            self._warned.add(part)
            where = f"sample {sample.key.sample} of iteration {sample.key.iteration}"
            log.warning("%s: its chat template does not write the %s of %s as it stands", self._field, part, where)
        ids: list[int] = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return ids if self._closes else self._ended(ids)

    def _ended(self, ids: list[int]) -> list[int]:
        end = self._tokenizer.eos_token_id
        return ids if end is None or ids[-1] == end else [*ids, end]

    def _ends_turns(self) -> bool:
        """Return whether the template writes an end-of-turn mark after the last response, or refuses the trial.

        Raises WorkError for a template that depends on the date or on chance.
        """
        messages = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
        try:
            return not render_undated(self._tokenizer, messages).endswith(PROBE)
        except ValueError as error:
            message = f"{self._field}: {error}"
            raise WorkError("ModelUnsupported", message, field=self._field, exit_code=ExitCode.BAD_MODEL) from error
        except Exception:  # a refusal is reported for each sample
            return True

    @staticmethod
    def _invalid(sample: ScoringSample, problem: str) -> WorkError:
        return WorkError("SampleInvalid", f"sample {sample.key.sample} of iteration {sample.key.iteration} {problem}")


def _prompts(spec: RLHFJobSpec) -> tuple[Prompts, Prompts]:
    """Return the prompt settings of training samples and of evaluated ones."""
    return spec.prompts_of(0), spec.prompts_of(FIRST_EVALUATION_SAMPLE)


def difference(reward: Any, policy: Any, spec: RLHFJobSpec) -> str:
    """Return which part of the reward model's tokenizer differs from the policy's; empty if none does."""
    if reward.get_vocab() != policy.get_vocab() or _encoding(reward) != _encoding(policy):
        return "tokenizer"
    if reward.eos_token_id != policy.eos_token_id:
        return "end-of-sequence token"
    own, policy_templates = reward.chat_template, [_policy_template(policy, prompts) for prompts in _prompts(spec)]
    return "chat template" if own and any(template and template != own for template in policy_templates) else ""


def _encoding(tokenizer: Any) -> Any:
    """Return how a tokenizer splits texts, beside its vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = {} if backend is None else json.loads(backend.to_str())
    return [parts.get(name) for name in ("model", "normalizer", "pre_tokenizer", "post_processor")]


def _policy_template(policy: Any, prompts: Prompts) -> Any:
    """Return the template with which the job renders prompts; None without one."""
    if not prompts.chat_template:
        return None
    if prompts.chat_template_file is None:
        return policy.chat_template
    try:
        return Path(prompts.chat_template_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return prompts.chat_template_file
