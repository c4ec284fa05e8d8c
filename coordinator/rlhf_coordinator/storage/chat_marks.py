"""The marks of a chat template, which it writes around messages; they reveal a text that is already rendered."""

import re
from functools import cached_property
from pathlib import Path
from typing import Final

from rlhf_coordinator.failures import JobError
from rlhf_coordinator.storage.chat_template import ChatTemplate
from rlhf_coordinator.storage.prompt_places import Place

PROBE: Final = "rlhf-probe-5d1c"
"""Stand-in for a text when a template is tested."""
_MARK: Final = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
_NOWHERE: Final = Place(Path())


class ChatMarks:
    """The marks of one template."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def first_in(self, text: str) -> str:
        """Return the first mark in a text; empty without one.

        The template's line before a user message is the mark of a text that begins like it and ends like the beginning
        of an answer.
        """
        marks, (opening, answer) = self._pattern, self._openings
        found = marks.search(text) if marks is not None else None
        if found is not None:
            return found.group()
        rendered = bool(opening and answer) and text.strip().startswith(opening) and text.rstrip().endswith(answer)
        return opening if rendered else ""

    @cached_property
    def unwritten(self) -> str:
        """The text that the template writes before an answer, but not after a prompt, if it ignores
        add_generation_prompt.

        Empty where there is no such text.
        """
        asked = [{"role": "user", "content": PROBE}]
        try:
            begun, text = (self._template.render(_NOWHERE, asked, add_generation_prompt=asks) for asks in (True, False))
            answer = {"role": "assistant", "content": PROBE}
            whole = self._template.render(_NOWHERE, [*asked, answer], add_generation_prompt=False)
        except JobError:
            return ""  # the error of a line will explain it
        before = whole.rpartition(PROBE)[0]
        ignored = begun == text and PROBE in before and before.startswith(begun)
        return before[len(begun) :].strip() if ignored else ""

    @cached_property
    def _around(self) -> tuple[str, str, str]:
        """The texts that the template writes before a user message, after it, and at the beginning of the answer."""
        asked = [{"role": "user", "content": PROBE}]
        try:
            text = self._template.render(_NOWHERE, asked, add_generation_prompt=False)
            begun = self._template.render(_NOWHERE, asked, add_generation_prompt=True)
        except JobError:
            return "", "", ""  # the error of a line will explain it
        before, _, after = text.partition(PROBE)
        return before, after, begun.removeprefix(text) or after

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        before, after, _ = self._around
        marks = dict.fromkeys(_MARK.findall(before + after))
        return re.compile("|".join(map(re.escape, marks))) if marks else None

    @cached_property
    def _openings(self) -> tuple[str, str]:
        """The last line before the user's text, such as `user:`, and the beginning of the answer."""
        before, _, answer = self._around
        return before.strip().rpartition("\n")[2], answer.strip()
