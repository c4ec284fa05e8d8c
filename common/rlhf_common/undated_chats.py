"""Chats by the template of a model that judges, the same on every day.

Rule: a judgment must not depend on the day. A template that reads the date writes the one that it has for programs
that know none; one without such a date is refused. Who renders the policy's prompts has arguments for a date of its own
(spec.prompts.chatTemplateArguments).
"""

import re
from collections.abc import Sequence
from typing import Any, Final

from rlhf_common.chats import TOOLS, Message

DATE: Final = "strftime_now"
"""Function that gives templates the date of the day."""
RANDOM: Final = r"\|\s*random\b|\blipsum\b"
"""What templates draw at random by."""
_NO_DATE: Final = f"{{% set {DATE} = no_{DATE} %}}"
"""Begins a template for which the function is not defined, as its second name is not."""
_REMEDY: Final = "give a copy of the folder whose template does not"


def render_undated(tokenizer: Any, messages: Sequence[Message], **arguments: Any) -> str:
    """Return messages by the tokenizer's chat template. Raises ValueError for a template that would give another text
    on another day, and whatever else a template raises."""
    from jinja2.exceptions import UndefinedError

    template = str(tokenizer.get_chat_template(tools=arguments.get(TOOLS)))
    if re.search(RANDOM, template):
        raise ValueError(f"the chat template draws at random: {_REMEDY}")
    if DATE in template:
        arguments["chat_template"] = _NO_DATE + template
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **arguments))
    except UndefinedError as error:
        if DATE not in str(error):
            raise
        raise ValueError(f"the chat template writes the date of the day ({DATE}): {_REMEDY}") from error
