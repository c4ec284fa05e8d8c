"""The API server reads an applied body as YAML, even with text from other processes."""

import json

import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from rlhf_operator.api_client.client import yaml_of


@example("one\u2028two\u2029three\x85four")
@given(st.text(st.characters(codec="utf-8")))
def test_any_text_arrives_unchanged_by_either_reading(text: str) -> None:
    body = {"status": {"message": text, text: 1}}
    sent = yaml_of(body)
    assert json.loads(sent) == body
    assert yaml.safe_load(sent.decode()) == body


def test_an_emoji_is_no_pair_of_surrogates_and_half_of_one_is_no_failure() -> None:
    assert (
        yaml_of({"last": "GLHF! \U0001f3d6\ufe0f \\ud83c"}) == '{"last": "GLHF! \U0001f3d6\ufe0f \\\\ud83c"}'.encode()
    )
    assert json.loads(yaml_of({"cut": "\ud83c"})) == {"cut": "\ufffd"}
