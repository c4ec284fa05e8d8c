"""Prompt files: every bad line is named; the order depends only on the seed and the pass."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_api.algorithms.iteration_prompts import PromptSchedule
from rlhf_api.job.rollout import Prompts
from rlhf_common.names import ExitCode
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.storage.journal import Journal
from rlhf_coordinator.storage.prompt_cache import keep_tokenized, tokenized_before
from rlhf_coordinator.storage.prompts import Prompt, PromptSet, load_tokenizer, random_key
from rlhf_coordinator.storage.tokenized_prompts import read_prompts


class Characters:
    """A tokenizer with one token per character."""

    chat_template: str | None = None

    def __call__(self, texts: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        start = [7] if add_special_tokens else []
        return {"input_ids": [start * bool(text) + [ord(c) for c in text] for text in texts]}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)


def read(tmp_path: Path, text: str | bytes, **settings: Any) -> list[Prompt]:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    tokenizer = Characters()
    tokenizer.chat_template = settings.pop("template", None)
    return read_prompts(Prompts(path=str(path), **settings), tokenizer, 8)


def test_lines_become_prompts(tmp_path: Path) -> None:
    prompts = read(tmp_path, '{"prompt": "ab", "answer": 3}\n\n{"prompt": "c"}\n')
    assert prompts[0] == Prompt(1, b"\7\0\0\0a\0\0\0b\0\0\0", "ab", '{"prompt": "ab", "answer": 3}')
    assert prompts[1].line == 3


def test_chats_are_rendered_by_the_template_which_writes_special_tokens_itself(tmp_path: Path) -> None:
    line = json.dumps({"prompt": [{"role": "u", "content": "hi"}]})
    (prompt,) = read(tmp_path, line, chat_template=True, template="x")
    assert prompt.text == "<u>hi"
    assert prompt.tokens[:4] == b"<\0\0\0"


GOOD = '{"prompt": "a"}\n'


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        (GOOD + "{bad\n", {}, "line 2 is not JSON"),
        (GOOD + "[1]\n", {}, "line 2 is a JSON list, not an object"),
        (GOOD + '{"question": "a"}\n', {}, r"line 2 has no key 'prompt' \(prompts.promptKey\); it has question"),
        ('{"prompt": 3}\n', {}, "line 1 has a int under 'prompt'; it must be a string"),
        ("\n  \n", {}, "has no prompts; it needs at least one line"),
        (GOOD * 2 + '{"prompt": "123456789"}\n', {}, "line 3 has 10 tokens, rollout.maxPromptTokens is 8"),
        ('{"prompt": ""}\n', {}, "line 1 is an empty prompt"),
        (GOOD.encode() + b'{"prompt": "\xff"}\n', {}, "line 2 is not UTF-8"),
        ('{"prompt": ["a"]}\n', {"chat_template": True, "template": "x"}, "line 1 needs a string or a list of {role"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str | bytes, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message) as error:
        read(tmp_path, text, **settings)
    assert error.value.failure.exit_code == ExitCode.BAD_DATA
    assert error.value.failure.field == "spec.prompts.path"
    assert str(tmp_path / "prompts.jsonl") in error.value.failure.message


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"none.jsonl cannot be read: No such file") as error:
        read_prompts(Prompts(path=str(tmp_path / "none.jsonl")), Characters(), 8)
    assert error.value.failure.exit_code == ExitCode.BAD_DATA


def prompt_set(seed: int, *, shuffle: bool = True, each: int = 1, count: int = 5) -> PromptSet:
    prompts = [Prompt(n, b"", str(n), "") for n in range(count)]
    return PromptSet(prompts, seed=seed, shuffle=shuffle, schedule=PromptSchedule(4), samples_per_prompt=each)


def test_every_pass_visits_every_prompt_once_in_its_own_order() -> None:
    order = [prompt_set(1).prompt(i // 4, i % 4).text for i in range(15)]
    passes = [order[:5], order[5:10], order[10:]]
    assert all(sorted(texts) == list("01234") for texts in passes)
    assert passes[0] != passes[1]
    assert order == [prompt_set(1).prompt(i // 4, i % 4).text for i in range(15)]
    assert order != [prompt_set(2).prompt(i // 4, i % 4).text for i in range(15)]
    assert [prompt_set(1, shuffle=False).prompt(i // 4, i % 4).text for i in range(6)] == list("012340")


def test_samples_of_a_group_share_their_prompt() -> None:
    prompts = prompt_set(1, each=3)
    assert [prompts.group(sample) for sample in range(6)] == [0, 0, 0, 1, 1, 1]
    assert len({prompts.prompt(2, sample).text for sample in range(3)}) == 1


def test_what_takes_the_place_of_a_dropped_prompt_is_new_and_moves_no_other_prompt() -> None:
    prompts, untouched = prompt_set(7, count=11), prompt_set(7, count=11)
    for iteration in (0, 3, 1):
        own = [prompts.prompt(iteration, group).line for group in range(4)]
        added = [prompts.prompt(iteration, group).line for group in range(4, 11)]
        assert len({*own, *added}) == 11, "all others, each once"
        more = [prompts.prompt(iteration, group).line for group in range(11, 22)]
        assert len(set(more)) == 11, "and then all of the file"
        again = prompt_set(7, count=11)
        assert added[::-1] == [again.prompt(iteration, group).line for group in range(10, 3, -1)], "asked in any order"
    assert [prompts.prompt(0, group).line for group in range(4, 11)] != [
        prompts.prompt(1, group).line for group in range(4, 11)
    ]
    for iteration in range(6):
        assert [prompts.prompt(iteration, s) for s in range(4)] == [untouched.prompt(iteration, s) for s in range(4)]


def test_a_file_of_one_batch_is_drawn_from_again() -> None:
    prompts = prompt_set(7, count=3)
    assert {prompts.prompt(0, group).line for group in range(4, 7)} == {
        prompts.prompt(0, group).line for group in range(3)
    }


def test_random_keys_are_a_documented_hash() -> None:
    import hashlib

    expected = hashlib.blake2b(
        (5).to_bytes(8, "little") + (2).to_bytes(8, "little") + (3).to_bytes(8, "little"), digest_size=8
    ).digest()
    assert random_key(5, 2, 3) == int.from_bytes(expected, "little")
    assert len({random_key(5, i, s) for i in range(50) for s in range(50)}) == 2500


def test_tokenized_prompts_are_read_back_only_whole_and_under_their_digest(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    prompts = [Prompt(n, bytes(4 * n), f"t{n}", "{}") for n in range(1, 4)]
    keep_tokenized(journal, "a" * 64, prompts)
    assert tokenized_before(journal, "a" * 64) == prompts
    assert tokenized_before(journal, "b" * 64) is None
    (file,) = tmp_path.glob("prompts-*.log")
    file.write_bytes(file.read_bytes()[:-1])
    assert tokenized_before(journal, "a" * 64) is None


def test_an_actor_whose_folder_is_not_there_is_named() -> None:
    with pytest.raises(JobError, match=r"/models/nosuch: there is no such folder") as error:
        load_tokenizer("/models/nosuch")
    assert error.value.failure.exit_code == ExitCode.BAD_MODEL
    assert error.value.failure.field == "spec.models.actor.path"
