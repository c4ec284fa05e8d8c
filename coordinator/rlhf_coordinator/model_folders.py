"""The location of a model on this machine, from its path or hub id. Rule: downloads nothing."""

from pathlib import Path


def local_folder(source: str) -> Path | None:
    """Return the folder itself, or the snapshot of a hub id in this machine's cache; None when neither exists."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    if folder.is_absolute():
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
