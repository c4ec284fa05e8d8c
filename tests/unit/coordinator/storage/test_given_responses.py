"""Responses of the prompt file: tokenization, rejections with their messages, omissions, and ledgers that start with
them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_api.algorithms.iteration_prompts import PromptSchedule
from rlhf_api.job.rollout import Prompts
from rlhf_common.names import ExitCode
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.storage.batch import batch_parts, replayed, take_given
from rlhf_coordinator.storage.journal import Journal
from rlhf_coordinator.storage.prompt_cache import keep_tokenized, tokenized_before
from rlhf_coordinator.storage.prompts import Prompt, PromptSet
from rlhf_coordinator.storage.tokenized_prompts import read_prompts

END = 3
START = 7


class Letters:
    """A tokenizer with one token per letter, except that `th` is one token; `$` ends a sequence."""

    chat_template: str | None = None
    eos_token_id: int | None = END

    def __call__(self, texts: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        start = [START] if add_special_tokens else []
        return {"input_ids": [[*start, *map(self._id, text.replace("th", "\1"))] for text in texts]}

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    @staticmethod
    def _id(letter: str) -> int:
        return END if letter == "$" else ord(letter)

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        assert not tokenize
        said = "".join(f"<{message['role'][0]}>{message['content']}$\n" for message in messages)
        return said + "<a>" * add_generation_prompt


def read(
    tmp_path: Path, *records: Any, tokenizer: Any = None, keys: tuple[str, ...] = ("response",), **settings: Any
) -> list[Prompt]:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = tokenizer or Letters()
    tokenizer.chat_template = "x"
    return read_prompts(Prompts(path=str(path), **settings), tokenizer, 6, keys, 4)


def tokens(prompt: Prompt) -> list[list[int]]:
    return [np.frombuffer(response.tokens, "<i4").tolist() for response in prompt.responses]


def test_a_response_is_what_follows_the_prompt_with_the_end_of_the_sequence_once(tmp_path: Path) -> None:
    first, second = read(tmp_path, {"prompt": "ab", "response": "c"}, {"prompt": "ab", "response": "c$"})
    assert tokens(first) == tokens(second) == [[ord("c"), END]]
    assert first.responses[0].text == "c"


def test_a_token_that_prompt_and_response_would_share_is_not_used(tmp_path: Path) -> None:
    (prompt,) = read(tmp_path, {"prompt": "at", "response": "h"})
    assert np.frombuffer(prompt.tokens, "<i4").tolist() == [START, ord("a"), ord("t")]
    assert tokens(prompt) == [[ord("h"), END]]


def test_a_chat_response_is_what_the_template_writes_up_to_the_end_of_the_turn(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": ""}]
    said = {"prompt": chat, "response": "ok"}, {"prompt": chat, "response": [{"role": "assistant", "content": "ok"}]}
    settings: dict[str, Any] = {"chat_template": True, "overlong": "Filter"}
    path_tokens = [tokens(prompt) for prompt in read_long(tmp_path, *said, **settings)]
    assert path_tokens == [[[ord("o"), ord("k"), END]]] * 2


def read_long(tmp_path: Path, *records: Any, **settings: Any) -> list[Prompt]:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = Letters()
    tokenizer.chat_template = "x"
    return read_prompts(Prompts(path=str(path), **settings), tokenizer, 64, ("response",), 64)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a"}, r"data.jsonl line 2 has no key 'response' \(.*response.*\); it has prompt"),
        ({"prompt": "a", "response": 3}, "line 2 has a int under 'response'; it must be a string"),
        ({"prompt": "a", "response": ""}, "line 2 has an empty response under 'response'; write the response"),
        (
            {"prompt": "a", "response": "bcde"},
            "line 2 has 5 tokens under 'response', rollout.maxResponseTokens is 4; shorten it, raise",
        ),
    ],
)
def test_a_bad_response_is_named_by_file_line_and_key(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message) as error:
        read(tmp_path, {"prompt": "a", "response": "b"}, record)
    assert error.value.failure.exit_code == ExitCode.BAD_DATA
    assert error.value.failure.field == "spec.prompts.path"


def test_a_tokenizer_that_cannot_end_a_response_is_refused(tmp_path: Path) -> None:
    tokenizer = Letters()
    tokenizer.eos_token_id = None
    with pytest.raises(JobError, match="no end-of-sequence token"):
        read(tmp_path, {"prompt": "a", "response": "b"}, tokenizer=tokenizer)


LINES = (
    {"prompt": "a" * 6, "response": "b"},
    {"prompt": "a", "response": "b"},
    {"prompt": "a", "response": "bbbb"},
)
"""The first prompt is too long with its start token; the last response is too long with its end token."""


def test_overlong_lines_are_left_out_where_that_is_asked_for_and_counted(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"line 1 has 7 tokens, rollout\.maxPromptTokens is 6"):
        read(tmp_path, *LINES)
    (prompt,) = read(tmp_path, *LINES, overlong="Filter")
    assert (prompt.line, prompt.filtered) == (2, 2)
    with pytest.raises(JobError, match="has no line that is short enough: all 2 are longer"):
        read(tmp_path, LINES[0], LINES[2], overlong="Filter")


def prompt_set(prompts: list[Prompt], each: int) -> PromptSet:
    return PromptSet(prompts, seed=1, shuffle=False, schedule=PromptSchedule(2), samples_per_prompt=each)


def test_what_was_tokenized_comes_back_with_responses_and_counts(tmp_path: Path) -> None:
    prompts = read(tmp_path, *LINES, overlong="Filter")
    journal = Journal(tmp_path / "journal")
    keep_tokenized(journal, "d" * 64, prompts)
    assert tokenized_before(journal, "d" * 64) == prompts
    assert prompt_set(prompts, 1).filtered == [2]


def test_a_ledger_has_the_responses_from_the_start_and_a_replay_gives_the_same_batch(tmp_path: Path) -> None:
    records = [{"prompt": "a", "good": f"{n}", "bad": "xy"} for n in range(3)]
    prompts = prompt_set(read(tmp_path, *records, keys=("good", "bad")), 2)
    ledger = take_given(Ledger(1, 4, (), 1), prompts)
    assert ledger.all_scored
    assert [sample.text for sample in ledger.samples] == ["2", "xy", "0", "xy"]
    parts = list(batch_parts(ledger, prompts))
    assert parts == list(batch_parts(replayed(1, 4, (), [], prompts), prompts))
    assert [sample.group for sample in parts[0].samples] == [0, 0, 1, 1]
    assert not any(sample.fields for sample in parts[0].samples)  # of whoever wrote them nothing is known
