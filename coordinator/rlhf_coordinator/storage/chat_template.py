"""The chat template that prompts are rendered by: that of the actor's tokenizer or a file's, with arguments.

Rule: an argument that the template does not read is an error, as nobody would notice that it does nothing. Must never
change the tokenizer: what is published and saved keeps the template that it came with.
"""

import re
from pathlib import Path
from typing import Any, Final

from rlhf_api.job.rollout import Message, Prompts
from rlhf_api.names import ExitCode
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.storage.prompt_places import Place

LARGEST: Final = 1 << 20
"""Bytes of a template; the longest that models come with have some ten thousand."""
OWN_ARGUMENTS: Final = frozenset(
    {
        *("conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message", "self"),
        *("tokenize", "padding", "truncation", "max_length", "tokenizer_kwargs"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
    }
)
"""What the coordinator says itself, and what is about tokens and not the text."""


class ChatTemplate:
    """A template that is ready to render."""

    def __init__(self, prompts: Prompts, tokenizer: Any) -> None:
        """Read the file, where there is one, and check the arguments. Raises JobError (exit code 22)."""
        self._tokenizer = tokenizer
        self._arguments: dict[str, Any] = dict(prompts.chat_template_arguments or {})
        given = template_text(prompts)
        own = tokenizer.chat_template
        if not (given or own):
            message = (
                "prompts.chatTemplate is true, but the tokenizer of models.actor.path has no chat template: "
                "give one with prompts.chatTemplateFile"
            )
            raise _error("chatTemplate", message)
        text = given or (own if isinstance(own, str) else "\n".join(own.values()))
        for name in self._arguments:
            _check_argument(name, text)
        if given:
            self._arguments["chat_template"] = given

    def render(self, place: Place, messages: list[Message], *, add_generation_prompt: bool) -> str:
        """Return messages as the model reads them. Raises JobError naming their place."""
        try:
            text = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=add_generation_prompt, tokenize=False, **self._arguments
            )
        except Exception as error:  # templates are user data and raise anything
            raise place.bad(f"is refused by the chat template: {error}") from error
        return str(text)


def template_text(prompts: Prompts) -> str:
    """Return the content of the template's file; nothing where there is none. Raises JobError."""
    if prompts.chat_template_file is None:
        return ""
    path, field = Path(prompts.chat_template_file), "chatTemplateFile"
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise _error(field, f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise _error(field, f"{path} is not UTF-8: {error.reason}") from error
    if len(data) > LARGEST or not text.strip():
        size = f"more than {LARGEST} bytes" if text.strip() else "nothing in it"
        raise _error(field, f"{path} has {size}; it must be a Jinja template, as tokenizers have it")
    return text


def _check_argument(name: str, text: str) -> None:
    if name in OWN_ARGUMENTS:
        raise _error(f"chatTemplateArguments.{name}", "is no argument of templates, or is given by the job; remove it")
    if not re.search(rf"\b{re.escape(name)}\b", text):
        message = "is not read by the chat template, so it would do nothing; correct its name, or remove it"
        raise _error(f"chatTemplateArguments.{name}", message)


def _error(name: str, message: str) -> JobError:
    return JobError("BadData", message, field=f"spec.prompts.{name}", exit_code=ExitCode.BAD_DATA)
