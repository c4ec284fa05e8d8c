"""Rendering of chats with the template of a judging model, so that a judgment does not depend on the day.

Rule: a template gets no `strftime_now`; one that calls it nevertheless is rejected.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

from rlhf_common.chats import TOOLS, Message

DATE: Final = "strftime_now"
"""Function that gives templates the current date."""
RANDOM: Final = r"\|\s*random\b|\blipsum\b"
"""Pattern of random functions in templates."""
_NO_DATE: Final = f"{{% set {DATE} = no_{DATE} %}}"
"""Prefix of a template that sets the function to an undefined name."""
_REMEDY: Final = "give a copy of the folder whose template does not"


def render_undated(tokenizer: Any, messages: Sequence[Message], **arguments: Any) -> str:
    """Return messages rendered by the tokenizer's chat template.

    Raises ValueError for a template that writes the date or draws at random, and the exceptions of the template.
    """
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
