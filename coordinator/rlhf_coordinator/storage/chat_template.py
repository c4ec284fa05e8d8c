"""The chat template for prompts: that of the actor's tokenizer or of a file, with arguments.

An argument that the template does not read is an error. So are the current date and random choices.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rlhf_api.job.rollout import Prompts
from rlhf_common.chats import Message
from rlhf_common.names import ExitCode
from rlhf_common.undated_chats import DATE, RANDOM
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.storage.prompt_places import Place

LARGEST: Final = 1 << 20
"""Largest template in bytes."""
OWN_ARGUMENTS: Final = frozenset(
    {
        *("conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message", "self"),
        *("tokenize", "padding", "truncation", "max_length", "tokenizer_kwargs"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "sanitize_control_tokens", "strftime_now"),
    }
)
"""Names that a job must not give as arguments."""


class ChatTemplate:
    """A template ready to render."""

    def __init__(self, prompts: Prompts, tokenizer: Any) -> None:
        """Read the file, if there is one, and check template and arguments. Raises JobError (exit code 22)."""
        self._tokenizer, self._prompts = tokenizer, prompts
        self._arguments: dict[str, Any] = dict(prompts.chat_template_arguments or {})
        configured = template_text(prompts)
        own = tokenizer.chat_template
        if not (configured or own):
            message = (
                f"{prompts.field}.chatTemplate is true, but the tokenizer of models.actor.path has no chat template: "
                f"give one with {prompts.field}.chatTemplateFile"
            )
            raise _error(prompts, "chatTemplate", message)
        self._text = configured or (own if isinstance(own, str) else "\n".join(own.values()))
        for name in self._arguments:
            self._check_argument(name)
        if re.search(RANDOM, self._text):
            message = "the chat template draws at random, so prompts would differ at every start: make it deterministic"
            raise _error(prompts, "chatTemplateFile", message)
        if configured:
            self._arguments["chat_template"] = configured
        if self.reads(DATE):
            # The name hides the function, so that a template that asks for the date fails.
            self._arguments[DATE] = DATE

    def reads(self, name: str) -> bool:
        """Return whether a name occurs in the template."""
        return re.search(rf"\b{re.escape(name)}\b", self._text) is not None

    def reads_key(self, name: str) -> bool:
        """Return whether this key occurs in the template after a dot or in quotes."""
        return re.search(rf"""\.\s*{re.escape(name)}\b|(['"]){re.escape(name)}\1""", self._text) is not None

    def render(
        self,
        place: Place,
        messages: list[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[dict[str, Any]] = (),
    ) -> str:
        """Return messages in the template's format. Raises JobError, which names their place, or the template's file
        if it asks for the date."""
        arguments = self._arguments | {"tools": list(tools)} if tools else self._arguments
        try:
            text = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=add_generation_prompt, tokenize=False, **arguments
            )
        except Exception as error:  # templates are user data and may raise anything
            if isinstance(error, TypeError) and DATE in arguments:
                raise self._dated() from error
            raise place.bad(f"is refused by the chat template: {error}") from error
        return str(text)

    def _dated(self) -> JobError:
        message = (
            f"the chat template writes the date of the day ({DATE}), so the prompts would change every day: give its "
            f"date by {self._prompts.field}.chatTemplateArguments where it takes one (date_string), or give a copy "
            "that has a fixed date"
        )
        return _error(self._prompts, "chatTemplateFile", message)

    def _check_argument(self, name: str) -> None:
        field = f"chatTemplateArguments.{name}"
        if name in OWN_ARGUMENTS:
            raise _error(self._prompts, field, "is no argument of templates, or is given by the job; remove it")
        if not self.reads(name):
            message = "is not read by the chat template, so it has no effect; correct its name, or remove it"
            raise _error(self._prompts, field, message)


def template_text(prompts: Prompts) -> str:
    """Return the content of the template's file; empty without one. Raises JobError."""
    if prompts.chat_template_file is None:
        return ""
    path, field = Path(prompts.chat_template_file), "chatTemplateFile"
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise _error(prompts, field, f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise _error(prompts, field, f"{path} is not UTF-8: {error.reason}") from error
    if len(data) > LARGEST or not text.strip():
        size = f"more than {LARGEST} bytes" if text.strip() else "nothing in it"
        raise _error(prompts, field, f"{path} has {size}; it must be a Jinja template, as tokenizers have it")
    return text


def _error(prompts: Prompts, name: str, message: str) -> JobError:
    return JobError("BadData", message, field=f"{prompts.field}.{name}", exit_code=ExitCode.BAD_DATA)
