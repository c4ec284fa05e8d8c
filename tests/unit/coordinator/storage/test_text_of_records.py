"""Texts of records: any UTF-8 text survives; an unpaired surrogate is rejected with file, line and key."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.model_folders.special_tokens import byte_tokenizer

from rlhf_api.job.rollout import Prompts
from rlhf_common.names import ExitCode
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.storage.journal import Journal
from rlhf_coordinator.storage.prompt_cache import keep_tokenized, tokenized_before
from rlhf_coordinator.storage.prompts import Prompt
from rlhf_coordinator.storage.tokenized_prompts import read_prompts

HALF = "\ud83d"


CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOKENIZER = byte_tokenizer(CHAT)


def read(path: Path, keys: tuple[str, ...] = ("response",), tokenizer: Any = TOKENIZER, **fields: Any) -> list[Prompt]:
    return read_prompts(Prompts(path=str(path), **fields), tokenizer, 1 << 20, keys, 1 << 20)


def text_of(tokens: bytes) -> str:
    ids = np.frombuffer(tokens, "<i4").tolist()
    return str(TOKENIZER.decode(ids[:-1] if ids[-1] == TOKENIZER.eos_token_id else ids))


@pytest.mark.parametrize(
    ("record", "key", "fields"),
    [
        ({"prompt": HALF, "response": "b"}, "prompt", {}),
        ({"prompt": "a", "response": f"b{HALF}b"}, "response", {}),
        ({"prompt": "a", "response": "b", "answer": [{"x": HALF}]}, "answer[0].x", {}),
        ({"prompt": "a", "response": "b", HALF: 1}, r"\ud83d", {}),
        ({"prompt": "a", "response": "b", "tools": [{"name": HALF}]}, "tools[0].name", {}),
        (
            {"prompt": [{"role": "user", "content": HALF}], "response": "b"},
            "prompt[0].content",
            {"chat_template": True},
        ),
        ({"prompt": "a", "response": "b", "answer": HALF}, "answer", {"columns": ["answer"]}),
    ],
)
def test_half_a_surrogate_pair_is_refused_by_file_line_and_key(
    tmp_path: Path, record: dict[str, Any], key: str, fields: dict[str, Any]
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": "a", "response": "b", "answer": ""}) + "\n" + json.dumps(record) + "\n")
    with pytest.raises(
        JobError, match=re.escape(f"data.jsonl line 2 has half a surrogate pair under {key!r}")
    ) as error:
        read(path, **fields)
    assert error.value.failure.exit_code == ExitCode.BAD_DATA
    assert error.value.failure.field == "spec.prompts.path"


def test_half_a_pair_in_a_column_that_is_not_read_is_no_problem(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": "a", "response": "b", "other": HALF, "answer": "\0"}))
    assert read(path, columns=["answer"])[0].record == json.dumps({"prompt": "a", "response": "b", "answer": "\0"})


def test_a_missing_key_beside_one_with_half_a_pair_is_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({HALF: 1}))
    with pytest.raises(JobError, match=re.escape(r"has no key 'prompt' (prompts.promptKey); it has \ud83d")):
        read(path, columns=["prompt"])


def test_half_a_pair_that_the_chat_template_writes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": "a"}))
    with pytest.raises(JobError, match="line 1 is rendered by the chat template with half a surrogate pair"):
        read(path, (), byte_tokenizer(CHAT + r"{{ '\ud83d' }}"), chat_template=True)


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow"])
def test_half_a_pair_in_a_table_is_refused_by_row_and_column(tmp_path: Path, name: str) -> None:
    written = pa.array([b"ok", HALF.encode("utf-8", "surrogatepass")], pa.binary())
    column = pa.StringArray.from_buffers(2, *written.buffers()[1:])
    table, path = pa.table({"prompt": ["a", "b"], "response": column}), tmp_path / name
    if name == "t.parquet":
        pa.parquet.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(JobError, match=f"{name} row 2 has no text in column 'response'") as error:
        read(path)
    assert error.value.failure.exit_code == ExitCode.BAD_DATA


LETTERS = st.one_of(
    st.characters(),
    st.characters(categories=["Cs"]),
    st.sampled_from(["\0", "\x85", "\u2028", "\u202e", "\ufeff", "\ufffe", "e\u0301", "\U0001f468\u200d\U0001f469"]),
)
ODD = st.tuples(st.lists(LETTERS, min_size=1, max_size=8).map("".join), st.sampled_from([1, 1, 1, 3000])).map(
    lambda drawn: drawn[0] * drawn[1]
)
"""Texts over all of Unicode: controls, odd line breaks, other directions, combined letters, half pairs, long texts."""


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompt=ODD, response=ODD, column=ODD, key=ODD, escape=st.booleans(), chat=st.booleans(), columns=st.booleans())
def test_any_text_comes_back_or_is_refused_by_file_line_and_key(
    tmp_path: Path, prompt: str, response: str, column: str, key: str, *, escape: bool, chat: bool, columns: bool
) -> None:
    said = [{"role": "user", "content": prompt}] if chat and escape else prompt
    texts = {"prompt": said, "response": response, "answer": column} | ({} if key in TAKEN else {key: [column]})
    whole = all(map(is_whole, [*texts, prompt, response, column]))
    path = tmp_path / "data.jsonl"
    path.write_bytes((json.dumps(texts, ensure_ascii=escape or not whole) + "\n").encode())
    fields: dict[str, Any] = {"chat_template": chat, "columns": ["answer"] if columns else []}
    if not (all(map(is_whole, (prompt, response, column))) and (columns or whole)):
        with pytest.raises(JobError, match=r"data.jsonl line 1 has half a surrogate pair under") as error:
            read(path, **fields)
        assert error.value.failure.exit_code == ExitCode.BAD_DATA
        return
    read_back = read(path, **fields)
    assert text_of(read_back[0].tokens) == (f"<user>{prompt}<assistant>" if chat else prompt)
    assert text_of(read_back[0].responses[0].tokens) == response
    record = json.loads(read_back[0].record)
    assert record == ({name: texts[name] for name in TAKEN} if columns else texts)
    journal = Journal(tmp_path / "journal")
    keep_tokenized(journal, "d" * 64, read_back)
    assert tokenized_before(journal, "d" * 64) == read_back


@settings(deadline=None, max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ODD.map(lambda text: "".join(filter(is_whole, text)) or "a"), min_size=10, max_size=20))
def test_any_text_of_a_table_comes_back(tmp_path: Path, texts: list[str]) -> None:
    path = tmp_path / "t.parquet"
    pa.parquet.write_table(pa.table({"prompt": texts, "response": texts, "other": [[text] for text in texts]}), path)
    for text, prompt in zip(texts, read(path), strict=True):
        assert text_of(prompt.tokens) == text_of(prompt.responses[0].tokens) == text
        assert json.loads(prompt.record) == {"prompt": text, "response": text, "other": [text]}


TAKEN = ("prompt", "response", "answer")


def is_whole(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def test_a_record_that_is_nested_too_deeply_for_any_reader_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "answer": ' + "[" * 900 + "]" * 900 + "}")
    with pytest.raises(JobError, match=r"data.jsonl line 1 is nested more than 64 levels deep under 'answer\[0\]"):
        read(path, ())
