"""Texts and tokens: a prompt begins once and does not end; the text of a response has every token but those that end
it."""

import pytest
from tests.support.special_tokens import tokenizer_that_writes

from rlhf_api.text_tokens import added_tokens, prompt_tokens


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
