"""Responses end at the first of stop tokens, stop strings and their limit, with any interruptions."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.model_folders.models import VOCABULARY
from tests.support.workers.engine_driving import MakeEngine, finish, requests, resumed

from rlhf_common.samples import ResponsePart, VersionSpan
from rlhf_workers.generation.stopping import StopRule


def cut(
    response: ResponsePart, tokenizer: Any, strings: tuple[str, ...], ids: tuple[int, ...]
) -> tuple[list[int], str]:
    """Return the end of an undisturbed response, found by checking every prefix."""
    tokens = response.tokens.tolist()
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:end])
        if tokens[end - 1] in ids or any(string in text for string in strings):
            return tokens[:end], "stop"
    return tokens, response.finish_reason


@pytest.mark.parametrize(("strings", "ids"), [((), (7, 20)), (("a",), ()), (("11", "q", "7+"), (30,))])
def test_a_response_ends_at_the_first_stop(
    strings: tuple[str, ...], ids: tuple[int, ...], make_engine: MakeEngine, load: Callable[[str], tuple[Any, Any]]
) -> None:
    samples = requests(16, response=60)
    free = finish(make_engine(slots=16), samples)
    stopped = finish(make_engine(slots=16, stop=strings, stop_token_ids=ids), samples)
    assert any(len(stopped[number].tokens) < len(free[number].tokens) for number in free)
    for number, response in free.items():
        tokens, reason = cut(response, load("llama")[1], strings, ids)
        assert (stopped[number].tokens.tolist(), stopped[number].finish_reason) == (tokens, reason)


def test_the_end_of_sequence_token_stops_and_is_kept(make_engine: MakeEngine) -> None:
    done = finish(make_engine("mistral", temperature=2.0, slots=16), requests(30, response=90))
    stopped = [response for response in done.values() if response.finish_reason == "stop"]
    assert stopped
    assert all(response.tokens[-1] == 1 and 1 not in response.tokens[:-1] for response in stopped)


def test_a_resumed_sample_that_is_complete_is_finished_at_once(make_engine: MakeEngine) -> None:
    sample = requests(1, response=4)[0]
    for tokens, reason in (([9, 9, 9, 9], "length"), ([9, 1], "stop"), ([9, 16], "stop")):
        engine = make_engine(stop=("d",))
        decoded = ResponsePart(
            sample.key,
            0,
            np.array(tokens, np.int32),
            np.zeros(len(tokens), np.float32),
            (VersionSpan(0, len(tokens)),),
        )
        engine.submit([resumed(sample, decoded)])
        report = engine.step()
        assert [(r.tokens.tolist(), r.finish_reason) for r in report.finished] == [(tokens, reason)]
        assert report.decoded == 0
        assert engine.in_flight == 0


class Bytes:
    """A tokenizer whose tokens are bytes: a multi-byte character is complete only with its last token."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    def batch_decode(self, batch: list[list[int]], **_: Any) -> list[str]:
        return [self.decode(ids) for ids in batch]

    def __len__(self) -> int:
        return 256


def test_a_stop_string_of_many_bytes_is_found_when_its_last_byte_comes() -> None:
    rule = StopRule(Bytes(), 300, [], ["→ü"])
    text = list("a very long text before it → and →ü".encode())
    ends = [
        end
        for end in range(1, len(text) + 1)
        if rule.may_complete[text[end - 1]] and rule.ends_with_string(np.array(text[:end], np.int32))
    ]
    assert ends == [len(text)]
    assert not rule.may_complete[ord("a")]


def test_without_stop_strings_no_text_is_decoded() -> None:
    rule = StopRule(None, VOCABULARY, [1, 500], [])
    assert not rule.has_strings
    assert np.flatnonzero(rule.is_stop).tolist() == [1]
