"""A folder of tables: which of its files contain the prompts, and in which order.

It is the output of `Dataset.save_to_disk` of the library datasets, or has parquet or Arrow files, in the order of their
names. An ambiguous folder is an error.
"""

import re
from pathlib import Path
from typing import Any, Final

from rlhf_common.json_document import parse_json
from rlhf_coordinator.storage.prompt_places import Place

PARQUET: Final = ".parquet"
ARROW: Final = ".arrow"
MOST_FILES: Final = 4096
"""Most files of a folder."""
_LARGEST_STATE: Final = 1 << 20
"""Largest state.json in bytes."""
_PART_OF: Final = re.compile(r"(.*?)-(\d{5})-of-(\d{5})(?:\.\w+)?$")
"""Names of files that are parts of a set."""


def is_table(path: Path) -> bool:
    """Return whether a file's name marks it as a table."""
    return path.suffix in (PARQUET, ARROW)


def tables_of(whole: Place) -> list[Path]:
    """Return the files of a folder, in order. Raises JobError."""
    try:
        names = sorted(path.name for path in whole.path.iterdir())
        if "dataset_dict.json" in names:
            raise whole.bad(f"is a folder of several sets ({_sets(whole.path, names)}); give the path of one of them")
        files = _listed(whole) if "state.json" in names else [name for name in names if is_table(Path(name))]
    except OSError as error:
        raise whole.bad(f"cannot be read: {error.strerror or error}") from error
    if not files or len(files) > MOST_FILES:
        raise whole.bad(f"has {len(files)} parquet or Arrow files; it needs 1 to {MOST_FILES}")
    kinds = sorted({Path(name).suffix for name in files})
    if len(kinds) > 1:
        raise whole.bad(f"has {' and '.join(kinds)} files; give the path of a folder with one kind")
    if "state.json" not in names:
        _check_parts(whole, files)
    return [whole.path / name for name in files]


def _sets(path: Path, names: list[str]) -> str:
    return ", ".join(name for name in names if (path / name).is_dir())


def _listed(whole: Place) -> list[str]:
    """Return the files in state.json."""
    with (whole.path / "state.json").open("rb") as file:
        data = file.read(_LARGEST_STATE + 1)
    try:
        if len(data) > _LARGEST_STATE:
            raise ValueError(f"it has more than {_LARGEST_STATE} bytes")
        state: Any = parse_json(data)
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except (ValueError, TypeError, KeyError) as error:
        raise whole.bad(f"has a state.json that save_to_disk did not write: {error!r}") from error
    for name in names:
        if Path(name).name != name or Path(name).suffix != ARROW:
            raise whole.bad(f"has a state.json that lists {name!r}, which is no Arrow file of this folder")
        if not (whole.path / name).is_file():
            raise whole.bad(f"lacks {name}, which its state.json lists")
    return names


def _check_parts(whole: Place, names: list[str]) -> None:
    """Refuse parts of several sets, such as train and test, and a set with missing parts."""
    parts = [match for match in map(_PART_OF.match, names) if match]
    sets = sorted({match[1] for match in parts})
    if len(sets) > 1 or (parts and len(parts) < len(names)):
        others = [name for name in names if not _PART_OF.match(name)]
        raise whole.bad(f"has files of several sets ({', '.join([*sets, *others][:8])}); give a folder with one set")
    if parts and len(parts) != int(parts[0][3]):
        raise whole.bad(f"has {len(parts)} of {int(parts[0][3])} parts of {sets[0]!r}; some are missing")
