"""The policy's input limits and stop tokens, from its tokenizer and JSON files.

Rule: it needs no weights.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rlhf_api.algorithms import graph_of
from rlhf_api.job import RLHFJobSpec
from rlhf_common.json_document import parse_json
from rlhf_common.model_files.model_limits import context_length, end_ids
from rlhf_common.model_files.text_tokens import added_tokens
from rlhf_common.names import ExitCode
from rlhf_coordinator.failures import JobError

FIELD: Final = "spec.models.actor.path"
STOPS_FIELD: Final = "spec.rollout.stopTokenIds"
_GENERATION: Final = "generation_config.json"


@dataclass(frozen=True, slots=True)
class PolicyLimits:
    """Limits of the policy; the default values stand for an unknown policy."""

    vocabulary: int | None = None
    """Size of the vocabulary in its configuration; None if unknown."""
    positions: int | None = None
    """Longest sequence in tokens; None if unknown or without a limit."""
    stops: frozenset[int] = frozenset()
    """Ids of tokens at which generation stops."""
    stop_strings: tuple[str, ...] = ()
    """Strings at which generation stops."""
    start: tuple[int, ...] = ()
    """Ids of the tokens with which the tokenizer begins a text."""
    unknown: int | None = None
    """Id of the token for characters that the tokenizer does not know; None without one of its own."""
    generates: bool = False
    """Whether the job generates responses."""


def read_policy_limits(spec: RLHFJobSpec, tokenizer: Any) -> PolicyLimits:
    """Return the limits of the policy of a resolved job.

    Raises JobError (exit code 21 for a bad model, 2 for a stop token that it lacks).
    """
    source, rollout = spec.models.actor.path, spec.rollout
    try:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(source)
        generation = _generation_config(source)
    except Exception as error:  # every configuration fails in its own way
        message = f"{source}: its config.json or {_GENERATION} cannot be read: {error}"
        raise JobError("ModelCorrupt", message, field=FIELD, exit_code=ExitCode.BAD_MODEL) from error
    text = config.get_text_config()
    own = generation.get("eos_token_id") if generation is not None else _end_of(text) or _end_of(config)
    vocabulary, end = getattr(text, "vocab_size", None), tokenizer.eos_token_id
    if vocabulary is not None and end is not None and end >= vocabulary:
        message = (
            f"{source}: the end-of-sequence token {tokenizer.eos_token!r} of its tokenizer has the id {end}, and the "
            f"model has {vocabulary} tokens, so no response could end: resize the model's embeddings"
        )
        raise JobError("TokenOutsideVocabulary", message, field=FIELD, exit_code=ExitCode.BAD_MODEL)
    if vocabulary is not None and (outside := [stop for stop in rollout.stop_token_ids if stop >= vocabulary]):
        message = f"{outside[0]} is no token of the policy, which has {vocabulary}, so nothing would stop there"
        raise JobError("TokenOutsideVocabulary", message, field=STOPS_FIELD, exit_code=ExitCode.USAGE)
    return PolicyLimits(
        vocabulary,
        context_length(text),
        frozenset(end_ids(rollout.stop_token_ids, end, own)),
        tuple(rollout.stop),
        _start(tokenizer),
        _unknown(tokenizer),
        graph_of(spec).generates,
    )


def _start(tokenizer: Any) -> tuple[int, ...]:
    try:
        return tuple(added_tokens(tokenizer).start)
    except ValueError as error:
        raise JobError("ModelUnsupported", str(error), field=FIELD, exit_code=ExitCode.BAD_MODEL) from error


def _unknown(tokenizer: Any) -> int | None:
    """Return the id of the unknown token, unless it also has another meaning."""
    meaningful = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
    return None if tokenizer.unk_token_id in meaningful else tokenizer.unk_token_id


def _end_of(config: Any) -> Any:
    return getattr(config, "eos_token_id", None)


def _generation_config(source: str) -> dict[str, Any] | None:
    """Return the content of generation_config.json; None where none is found. Raises the errors of reading it."""
    from transformers.utils import cached_file

    path = cached_file(
        source,
        _GENERATION,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if path is None:
        return None
    content = parse_json(Path(path).read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"it is a JSON {type(content).__name__}, not an object")
    return content
