"""What a reward model with a tokenizer of its own reads: the conversation in its own words, to its own end.

A prompt of messages is rendered by the reward model's chat template with the response as the assistant's message, as
its makers rendered what it was trained on; the policy's template never reaches it. A prompt of plain text stays plain
text: prompt and response as they are, and the reward model's end-of-sequence token, at which such models are read.
"""

import json
from typing import Any, Final

import numpy as np

from rlhf_api.chats import tools_of
from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.rollout import Prompts
from rlhf_api.names import ExitCode
from rlhf_api.samples import FIRST_EVALUATION_SAMPLE, ScoringSample, TokenArray
from rlhf_api.text_tokens import added_tokens, prompt_tokens
from rlhf_workers.failures import WorkError

PROBE: Final = "probe"
"""Stands for a text when a template is tried."""


class OwnTokenizer:
    """A reward model's tokenizer and template."""

    def __init__(self, tokenizer: Any, spec: RLHFJobSpec, field: str) -> None:
        """`field` is the manifest's for the reward model. WorkError when it cannot render the job's prompts, or those
        of its evaluation."""
        self._tokenizer, self._field = tokenizer, field
        self._trained, self._evaluated = spec.prompts_of(0), spec.prompts_of(FIRST_EVALUATION_SAMPLE)
        for prompts in (self._trained, self._evaluated):
            if prompts.chat_template and not tokenizer.chat_template:
                message = (
                    f"{field}: its tokenizer is another one than the actor's and has no chat template, but "
                    f"{prompts.field}.chatTemplate is true; add the template it was trained with to its folder"
                )
                raise WorkError("ModelUnsupported", message, field=field, exit_code=ExitCode.BAD_MODEL)
        self._closes = bool(tokenizer.chat_template) and _closes(tokenizer)

    def tokens(self, sample: ScoringSample) -> TokenArray:
        """int32 [n >= 1] of prompt and response; WorkError SampleInvalid when there is nothing to read."""
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
            text = str(self._tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False))
        except Exception as error:  # templates are user data and raise anything
            raise self._invalid(sample, f"is refused by the chat template of {self._field}: {error}") from error
        ids: list[int] = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return ids if self._closes else self._ended(ids)

    def _ended(self, ids: list[int]) -> list[int]:
        end = self._tokenizer.eos_token_id
        return ids if end is None or ids[-1] == end else [*ids, end]

    @staticmethod
    def _invalid(sample: ScoringSample, what: str) -> WorkError:
        return WorkError("SampleInvalid", f"sample {sample.key.sample} of iteration {sample.key.iteration} {what}")


def _closes(tokenizer: Any) -> bool:
    """Whether the template writes something after the last response, as most do: a mark that ends the turn."""
    messages = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
    try:
        return not str(tokenizer.apply_chat_template(messages, tokenize=False)).endswith(PROBE)
    except Exception:  # templates are user data and raise anything; what they refuse is said sample by sample
        return True


def differs(reward: Any, policy: Any) -> bool:
    """Whether `reward` maps texts to other ids than `policy` does."""
    return bool(reward.get_vocab() != policy.get_vocab())
