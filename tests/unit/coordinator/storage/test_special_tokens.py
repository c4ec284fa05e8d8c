"""Special tokens of prompts and responses: a tokenizer adds none that the model is not to read, and drops none."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.special_tokens import tokenizer_that_writes

from rlhf_api.job.rollout import Prompts
from rlhf_coordinator.storage.prompts import Prompt
from rlhf_coordinator.storage.tokenized_prompts import read_prompts


def read(tmp_path: Path, tokenizer: Any, *records: Any, keys: tuple[str, ...] = (), **fields: Any) -> list[Prompt]:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_prompts(Prompts(path=str(path), **fields), tokenizer, 64, keys, 64)


def words(tokenizer: Any, tokens: bytes) -> str:
    return " ".join(tokenizer.convert_ids_to_tokens(np.frombuffer(tokens, "<i4").tolist()))


@pytest.mark.parametrize("single", ["<bos> $A", "<bos> $A <eos>"])
def test_a_plain_prompt_begins_once_and_does_not_end(tmp_path: Path, single: str) -> None:
    tokenizer = tokenizer_that_writes(single)
    prompts = read(tmp_path, tokenizer, {"prompt": "1+"}, {"prompt": "<bos>1+"})
    assert [words(tokenizer, prompt.tokens) for prompt in prompts] == ["<bos> 1 +"] * 2


def test_a_response_follows_the_prompt_of_a_tokenizer_that_ends_every_text(tmp_path: Path) -> None:
    tokenizer = tokenizer_that_writes("<bos> $A <eos>")
    (prompt,) = read(tmp_path, tokenizer, {"prompt": "<bos>1+", "response": "2"}, keys=("response",))
    assert words(tokenizer, prompt.tokens) == "<bos> 1 +"
    assert words(tokenizer, prompt.responses[0].tokens) == "2 <eos>"


def test_a_chat_template_that_writes_the_first_token_writes_it_alone(tmp_path: Path) -> None:
    tokenizer = tokenizer_that_writes("<bos> $A <eos>")
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}={% endfor %}"
    (prompt,) = read(tmp_path, tokenizer, {"prompt": "1+"}, chat_template=True)
    assert words(tokenizer, prompt.tokens) == "<bos> 1 + ="
