"""Prompts: reads the JSONL file, tokenizes it, and says which prompt every sample of every iteration gets.

Order: sample s of iteration i belongs to group s // n (n samples per prompt); groups count on through the iterations,
and group number g visits entry g mod N of epoch g // N. With shuffle the order of an epoch is by the 64-bit hash of
(seed, epoch, entry), so it depends on nothing else. That hash, and the `random_key` of a sample: the first 8 bytes
(little endian) of BLAKE2b over three unsigned 64-bit little-endian integers, here (seed, iteration, sample). Rule: a
bad line is an error with its number before anything starts (exit code 22); nothing is skipped or cut.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.rollout import Prompts
from rlhf_api.names import ExitCode, Group
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.model_folders import local_folder

_CHUNK: Final = 1024
"""Prompts tokenized at once: enough for the tokenizer's own threads, little memory."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of the prompt file."""

    line: int
    """From 1."""
    tokens: bytes
    """int32, little endian."""
    text: str
    """What was tokenized (a chat: as its template renders it)."""
    record: str
    """The line's JSON object."""


class PromptSet:
    """All prompts of a job and their order."""

    def __init__(
        self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool, per_iteration: int, samples_per_prompt: int
    ) -> None:
        """`per_iteration`: prompts of one iteration."""
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._per_iteration = per_iteration
        self._samples_per_prompt = samples_per_prompt
        # The epochs that one iteration goes through, and those of the one before, which may be replayed.
        self._order_of = lru_cache(maxsize=4 + 2 * per_iteration // len(prompts))(self._order)

    def __len__(self) -> int:
        return len(self._prompts)

    def group(self, sample: int) -> int:
        """Return the group of a sample inside its iteration: samples of one prompt share it."""
        return sample // self._samples_per_prompt

    def of(self, iteration: int, sample: int) -> Prompt:
        """Return the prompt of a sample."""
        position = iteration * self._per_iteration + self.group(sample)
        epoch, place = divmod(position, len(self._prompts))
        return self._prompts[int(self._order_of(epoch)[place])]

    def _order(self, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        count = len(self._prompts)
        if not self._shuffle:
            return np.arange(count, dtype=np.int64)
        keys = [_hash(self._seed, epoch, index) for index in range(count)]
        return np.argsort(np.array(keys, dtype=np.uint64), kind="stable")


def random_key(seed: int, iteration: int, sample: int) -> int:
    """Return the only source, with the position in the response, of a sample's randomness (unsigned, 64 bits)."""
    return _hash(seed, iteration, sample)


def _hash(*numbers: int) -> int:
    packed = struct.pack(f"<{len(numbers)}Q", *numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def prompts_digest(spec: RLHFJobSpec) -> str:
    """Return the SHA-256 of the prompt file and of how it is read: a journal is never continued with other prompts."""
    how = (spec.prompts.prompt_key, spec.prompts.chat_template, spec.models.actor.path, spec.rollout.max_prompt_tokens)
    digest = hashlib.sha256(json.dumps(how).encode())
    digest.update(_bytes(Path(spec.prompts.path)))
    return digest.hexdigest()


def read_prompts(prompts: Prompts, tokenizer: Any, max_tokens: int) -> list[Prompt]:
    """Return every line of the file, tokenized. Raises JobError (exit code 22) naming the first bad line."""
    path = Path(prompts.path)
    rendered = list(_texts(path, prompts, tokenizer))
    if not rendered:
        raise _bad(path, 0, "has no prompts; it needs at least one line with a JSON object")
    result: list[Prompt] = []
    for start in range(0, len(rendered), _CHUNK):
        chunk = rendered[start : start + _CHUNK]
        # A chat template writes the special tokens itself.
        encoded = tokenizer([text for _, text, _ in chunk], add_special_tokens=not prompts.chat_template)["input_ids"]
        for (line, text, record), ids in zip(chunk, encoded, strict=True):
            result.append(Prompt(line, _checked(path, line, ids, max_tokens), text, record))
    return result


def _checked(path: Path, line: int, ids: list[int], max_tokens: int) -> bytes:
    if not ids:
        raise _bad(path, line, "is an empty prompt: it has no tokens, so there is nothing to continue")
    if len(ids) > max_tokens:
        message = f"has {len(ids)} tokens, rollout.maxPromptTokens is {max_tokens}; shorten it or raise the limit"
        raise _bad(path, line, message)
    return np.array(ids, dtype="<i4").tobytes()


def _texts(path: Path, prompts: Prompts, tokenizer: Any) -> Iterator[tuple[int, str, str]]:
    """Yield (line number, text, record) of every line that is not blank."""
    try:
        content = _bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        line = _bytes(path)[: error.start].count(b"\n") + 1
        raise _bad(path, line, f"is not UTF-8: {error.reason}") from error
    for number, line_text in enumerate(content.split("\n"), start=1):
        if line_text.strip():
            yield number, _text(path, number, line_text, prompts, tokenizer), line_text.strip()


def _text(path: Path, number: int, line: str, prompts: Prompts, tokenizer: Any) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise _bad(path, number, f"is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise _bad(path, number, f"is a JSON {type(record).__name__}, not an object")
    key = prompts.prompt_key
    if key not in record:
        raise _bad(path, number, f"has no key {key!r} (prompts.promptKey); it has {', '.join(record) or 'none'}")
    value = record[key]
    if not prompts.chat_template:
        if not isinstance(value, str):
            raise _bad(path, number, f"has a {type(value).__name__} under {key!r}; it must be a string")
        return value
    if not isinstance(value, list) or not all(_is_message(message) for message in value):
        raise _bad(path, number, f"needs a list of {{role, content}} messages under {key!r} (prompts.chatTemplate)")
    return _render(path, number, value, tokenizer)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(part), str) for part in ("role", "content"))


def _render(path: Path, number: int, messages: list[dict[str, str]], tokenizer: Any) -> str:
    if not tokenizer.chat_template:
        message = "prompts.chatTemplate is true, but the tokenizer of models.actor.path has no chat template"
        raise JobError("BadData", message, field="spec.prompts.chatTemplate", exit_code=ExitCode.BAD_DATA)
    try:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    except Exception as error:  # templates are user data and raise anything
        raise _bad(path, number, f"is refused by the chat template: {error}") from error


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _bad(path, 0, f"cannot be read: {error.strerror or error}") from error


def _bad(path: Path, line: int, what: str) -> JobError:
    where = f"{path} line {line}" if line else f"{path}"
    return JobError("BadData", f"{where} {what}", field="spec.prompts.path", exit_code=ExitCode.BAD_DATA)


def load_tokenizer(source: str, rank_group: Group = Group.TRAINING) -> Any:
    """Return the actor's tokenizer, of a folder or of a hub id. Raises JobError (exit code 21) when there is none.

    `rank_group`: whose template says what the coordinator mounts and where hub models are. Loads no torch by itself.
    """
    field = "spec.models.actor.path"
    if Path(source).is_absolute() and not Path(source).is_dir():
        message = f"{source}: there is no such folder; in a cluster the coordinator mounts what training pods mount"
        raise JobError("ModelMissing", message, field=field, exit_code=ExitCode.BAD_MODEL)
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(source)
    except Exception as error:  # every tokenizer format fails in its own way
        if local_folder(source) is None:
            message = (
                f"{source}: it is no folder here, and its tokenizer can neither be fetched from the hub nor found in "
                f"the cache ({os.environ.get('HF_HOME') or 'HF_HOME is not set'}): let pods of the job reach the hub; "
                f"or set HF_HOME in spec.{rank_group}.template to a folder with the model on a volume that is mounted "
                "there, which the coordinator takes on; or give the path of such a folder instead"
            )
            raise JobError("ModelMissing", message, field=field, exit_code=ExitCode.BAD_MODEL) from error
        message = f"{source}: its tokenizer cannot be loaded: {error}"
        raise JobError("ModelCorrupt", message, field=field, exit_code=ExitCode.BAD_MODEL) from error
