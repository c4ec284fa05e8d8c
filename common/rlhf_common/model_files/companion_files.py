"""The files of a model folder that belong to the model besides its weights.

They are files directly in the folder, and text files in sub-folders without weights, but no hidden files.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from rlhf_common.model_files.model_folder_check import QUANTISATION_FILES
from rlhf_common.model_files.weight_files import FolderError
from rlhf_common.names import ADAPTER_CONFIG

WEIGHTS: Final = (
    ".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".ggml", ".onnx", ".onnx_data", ".ckpt", ".npz",
    ".npy", ".tflite", ".pkl", ".pickle", ".ot", ".nemo", ".distcp", ".pdparams", ".engine", ".tar", ".gz", ".zip",
)  # fmt: skip
"""Suffixes of weights, training state and archives."""
TEXT: Final = frozenset(
    {".json", ".jinja", ".model", ".txt", ".tiktoken", ".py", ".md", ".yaml", ".yml", ".vocab", ".bpe", ".spm"}
)
"""Suffixes of configuration, tokenizers, templates, code and documents."""
NOT_COPIED: Final = frozenset({ADAPTER_CONFIG, *QUANTISATION_FILES})
"""Files that describe how to read the weights beside them."""
INDEX_SUFFIX: Final = ".index.json"
MAX_FILES: Final = 1000
MAX_BYTES: Final = 1 << 30
MAX_DEPTH: Final = 4
"""Maximum depth of nested sub-folders."""


def companion_files(folder: Path) -> list[str]:
    """Return the names of the files, sorted; in sub-folders with the path from `folder`. Raises FolderError above
    MAX_FILES files or MAX_BYTES bytes.
    """
    names = [str(file.relative_to(folder)) for file in sorted(_files(folder, folder, 0))]
    total = sum((folder / name).stat().st_size for name in names)
    if len(names) > MAX_FILES or total > MAX_BYTES:
        largest = max(names, key=lambda name: (folder / name).stat().st_size)
        raise FolderError(
            "ModelUnsupported",
            f"it holds {len(names)} files of {total} bytes besides its weights, which every checkpoint would get, and "
            f"{MAX_FILES} files of {MAX_BYTES} bytes are the most; the largest is {largest}: move away what is not the "
            "model's",
        )
    return names


def _files(root: Path, folder: Path, depth: int) -> Iterator[Path]:
    """Yield the files of a folder to copy."""
    for item in folder.iterdir():
        if item.name.startswith(".") or item.name == "__pycache__":
            continue
        if item.is_dir():
            if depth < MAX_DEPTH and not item.is_symlink() and _is_part_of_model(item):
                yield from _files(root, item, depth + 1)
        elif item.is_file() and (not depth or item.suffix in TEXT) and _is_companion(item) and _may_follow(root, item):
            yield item


def _is_companion(file: Path) -> bool:
    name = file.name
    return not name.endswith((*WEIGHTS, INDEX_SUFFIX)) and name not in NOT_COPIED


def _is_part_of_model(folder: Path) -> bool:
    """Return whether a sub-folder has no weights at any depth, and at most MAX_FILES entries."""
    items = list(islice(folder.rglob("*"), MAX_FILES + 1))
    return len(items) <= MAX_FILES and not any(item.name.endswith(WEIGHTS) for item in items)


def _may_follow(root: Path, file: Path) -> bool:
    """Return whether a file is no link, or a link that may be followed."""
    if not file.is_symlink():
        return True
    target, home = file.resolve(), root.resolve()
    in_cache = home.parent.name == "snapshots" and target.is_relative_to(home.parent.parent / "blobs")
    same_kind = file.parent == root and file.suffix in TEXT and target.suffix == file.suffix
    return target.is_relative_to(home) or in_cache or same_kind
