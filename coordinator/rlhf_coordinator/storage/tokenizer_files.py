"""The files of a tokenizer; their digest reveals an edited tokenizer or chat template. Downloads nothing."""

import hashlib
import re
from pathlib import Path
from typing import Final

from rlhf_common.names import ExitCode
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.model_folders import local_folder

IDENTITY: Final = "spec.models.actor.path (tokenizer and chat template)"
"""Name of the digest in the identity of a job."""
_ALWAYS_LOADED: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_NAME: Final = re.compile(
    r"(tokeni[sz]|chat_template|additional_chat_templates/|special_tokens|added_tokens|vocab|merges|spiece|sentencepiece)"
    r".*|.*\.(jinja|tiktoken|model|spm)"
)


def tokenizer_digest(source: str) -> str | None:
    """Return the SHA-256 of a tokenizer's files; None if none of them is on this machine. Raises JobError."""
    folder = local_folder(source)
    if folder is None:
        return None
    files = _files_of_folder(folder) if Path(source).is_dir() else [folder / name for name in _ALWAYS_LOADED]
    digest, read = hashlib.sha256(), False
    for path in files:
        try:
            if path.is_file():
                digest.update(f"{path.relative_to(folder)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
                read = True
        except OSError as error:
            message = f"{path} cannot be read: {error.strerror or error}"
            raise JobError(
                "ModelCorrupt", message, field="spec.models.actor.path", exit_code=ExitCode.BAD_MODEL
            ) from error
    return digest.hexdigest() if read else None


def _files_of_folder(folder: Path) -> list[Path]:
    files = [*folder.glob("*"), *folder.glob("additional_chat_templates/*")]
    return sorted(path for path in files if _NAME.fullmatch(str(path.relative_to(folder))))
