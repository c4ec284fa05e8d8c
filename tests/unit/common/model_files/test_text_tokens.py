"""Texts and tokens: a prompt has a start token and no end token; a response's text has all tokens except stop
tokens."""

from typing import Any

import pytest
from tests.support.model_folders.special_tokens import tokenizer_that_writes

from rlhf_common.model_files.text_tokens import added_tokens, prompt_tokens, response_text, text_ends


@pytest.mark.parametrize(
    ("single", "start", "end"),
    [
        ("$A", [], []),
        ("<bos> $A", ["<bos>"], []),
        ("$A <eos>", [], ["<eos>"]),
        ("<bos> $A <eos>", ["<bos>"], ["<eos>"]),
        ("<bos> <bos> $A <eos> <eos>", ["<bos>"] * 2, ["<eos>"] * 2),
        ("<eos> $A", ["<eos>"], []),
    ],
)
def test_a_prompt_begins_once_and_does_not_end(single: str, start: list[str], end: list[str]) -> None:
    tokenizer = tokenizer_that_writes(single)
    added = added_tokens(tokenizer)
    assert [tokenizer.convert_ids_to_tokens(ids) for ids in (added.start, added.end)] == [start, end]
    texts = ["12", "".join(start) + "12", "a<eos>", ""]
    written = [tokenizer.convert_ids_to_tokens(ids) for ids in prompt_tokens(tokenizer, texts)]
    assert written == [[*start, "1", "2"], [*start, "1", "2"], [*start, "a", "<eos>"], start]


def test_a_tokenizer_that_changes_a_text_by_its_special_tokens_is_named() -> None:
    def tokenizer(texts: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[4 if add_special_tokens else 3] for _ in texts]}

    with pytest.raises(ValueError, match=r"gives 'a' the tokens \[3\], and with special tokens \[4\]"):
        added_tokens(tokenizer)


CHAT = "{% for m in messages %}{{ m.content }}<end>\n{% endfor %}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>1</think>2<eos>", "<think>1</think>2"),
        ("<think>1<eos>", "<think>1"),
        ("1<eos>2<pad><eos><pad>", "1<eos>2"),
        ("1<unk> , 2 .", "1<unk> , 2 ."),
        ("<pad>1", "<pad>1"),
        ("<eos>", ""),
        ("", ""),
    ],
)
def test_the_text_of_a_response_has_every_token_but_its_end(text: str, expected: str) -> None:
    tokenizer = tokenizer_that_writes("$A", "<think>", "</think>")
    tokenizer.clean_up_tokenization_spaces = True
    tokens = tokenizer([text], add_special_tokens=False)["input_ids"][0]
    assert response_text(tokenizer, tokens, text_ends(tokenizer)) == expected


@pytest.mark.parametrize(
    ("template", "generation_ends", "stops", "ends"),
    [
        (None, None, "", "<pad> <eos>"),
        (None, "<end>", "", "<pad> <eos> <end>"),
        (None, ["<end>", "<tag>"], "", "<pad> <eos> <end> <tag>"),
        (None, None, "<end> 1", "<pad> <eos> <end>"),
        (CHAT, None, "<end> <tag> 1", "<pad> <eos> <end>"),
        (CHAT.replace("<end>", "!"), None, "<end>", "<pad> <eos> <end>"),
        ("{{ raise_exception('no') }}", None, "<end>", "<pad> <eos> <end>"),
    ],
)
def test_ends_are_those_of_tokenizer_model_and_manifest(
    template: str | None, generation_ends: Any, stops: str, ends: str
) -> None:
    tokenizer = tokenizer_that_writes("$A", "<end>", "<tag>")
    tokenizer.chat_template = template
    named = None if generation_ends is None else tokenizer.convert_tokens_to_ids(generation_ends)
    found = text_ends(tokenizer, named, tokenizer.convert_tokens_to_ids(stops.split()))
    assert found == set(tokenizer.convert_tokens_to_ids(ends.split()))
