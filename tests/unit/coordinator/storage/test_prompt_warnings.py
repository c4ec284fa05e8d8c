"""Warnings of prompt files: one sentence per kind at every start, even with cached prompts."""

from pathlib import Path

from rlhf_coordinator.storage.prompt_places import Place
from rlhf_coordinator.storage.prompt_warnings import PromptWarnings


def test_a_kind_names_its_first_line_and_counts_the_others() -> None:
    warnings, path = PromptWarnings(), Path("p.jsonl")
    for number in (3, 3, 4, 9):
        warnings.add(Place(path, number), "holds a mark", "remove it")
    warnings.add(Place(path, 5), "holds another", "remove it")
    assert warnings.messages() == (
        "p.jsonl line 3 holds a mark (and 2 more lines): remove it",
        "p.jsonl line 5 holds another: remove it",
    )
