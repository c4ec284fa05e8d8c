"""Every text that is no JSON document is a ValueError."""

import pytest

from rlhf_common.json_document import parse_json


def test_a_document_is_parsed_from_text_and_from_bytes() -> None:
    assert parse_json('{"a": [1, null]}') == parse_json(b'{"a": [1, null]}') == {"a": [1, None]}


@pytest.mark.parametrize("text", ["", "{", b"\xff", "9" * 5000, "[" * 100_000, b"[" * 100_000, '{"a":' * 100_000])
def test_what_is_no_document_is_a_value_error(text: str | bytes) -> None:
    """Deep nesting once ended processes with RecursionError, which readers of files do not expect."""
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)
