"""The file of carried samples in a checkpoint, with the schedules of `longRounds: Auto` and the expected lengths of
sorted windows.

In a checkpoint of version v they are the samples that iteration v takes up, or that wait for a later one.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rlhf_api.algorithms.iteration_prompts import PromptSchedules
from rlhf_api.job import RLHFJobSpec
from rlhf_coordinator.failures import storage_error
from rlhf_coordinator.state.carried_sample import CarriedSample
from rlhf_coordinator.storage.checkpoint import FIELD, Checkpoint
from rlhf_coordinator.storage.journal import frame, unframe
from rlhf_coordinator.storage.journal_pb2 import Begun, Record, Schedule
from rlhf_coordinator.storage.prompt_lengths import lengths_message, lengths_of
from rlhf_coordinator.storage.sample_codec import carried_messages, carried_samples, schedules_of
from rlhf_coordinator.storage.tokenizer_files import IDENTITY

FILE: Final = "carried.log"
FACT: Final = "carries"
"""Key in `checkpoint.json`: the identity of the job that carried the samples."""
_PROMPTS: Final = "spec.prompts (settings and contents)"
SHAPE: Final = (
    "spec.seed",
    "spec.rollout.batchSize",
    "spec.rollout.oversample",
    "spec.rollout.longRounds",
    "samples per prompt",
    _PROMPTS,
    "spec.prompts.shuffle",
    "spec.prompts.lengthWindow",
)
"""Fields of a job's identity that must be the same, because prompts and random keys follow from them."""
_BEFORE: Final = {"spec.rollout.longRounds": "Disabled", "spec.prompts.lengthWindow": 0}
"""Fields that earlier versions did not write -> their value then."""
_NO_LENGTHS: Final[Mapping[int, int]] = {}


def write(
    folder: Path,
    version: int,
    carried: Sequence[CarriedSample],
    schedules: Sequence[Schedule] = (),
    lengths: Mapping[int, int] = _NO_LENGTHS,
) -> None:
    """Write the samples cut off before iteration `version` into the folder of a checkpoint. Raises OSError.

    `schedules`: those of `longRounds: Auto`. `lengths`: expected tokens by line, of sorted windows.
    """
    begun = Begun(iteration=version, carried=carried_messages(carried), schedules=schedules)
    begun.lengths.CopyFrom(lengths_message(lengths))
    (folder / FILE).write_bytes(frame(Record(begun=begun)))


def read_schedules(checkpoint: Checkpoint, spec: RLHFJobSpec) -> PromptSchedules | None:
    """Return the schedules of a checkpoint; None if it was written without `longRounds: Auto`. Raises JobError."""
    records = _records(checkpoint)
    return schedules_of(records[0].begun, spec) if records else None


def read_lengths(checkpoint: Checkpoint, identity: Mapping[str, Any]) -> dict[int, int]:
    """Return the expected tokens by line that a checkpoint has; empty if the resuming job has other prompts or no
    sorted windows. Raises OSError and ValueError."""
    path, before = checkpoint.folder / FILE, checkpoint.facts.get(FACT, {})
    same = before.get(_PROMPTS) == identity.get(_PROMPTS) and identity.get("spec.prompts.lengthWindow", 0) > 1
    records = [record for record, _ in unframe(path.read_bytes())] if same and path.is_file() else []
    return lengths_of(records[0].begun.lengths) if records else {}


def read(checkpoint: Checkpoint, identity: Mapping[str, Any]) -> tuple[tuple[CarriedSample, ...], list[str]]:
    """Return the samples that a checkpoint carries, and a warning if samples are left out.

    `identity`: identity of the resuming job. Raises JobError, and ValueError for invalid samples or facts.
    """
    carried = carried_samples(_records(checkpoint))
    if not carried:
        return (), []
    try:
        before: dict[str, Any] = checkpoint.facts.get(FACT, {})
    except OSError as error:
        raise storage_error("the facts of a checkpoint", checkpoint.folder, error, FIELD, "read") from error
    changed = [name for name in SHAPE if before.get(name, _BEFORE.get(name)) != identity.get(name)]
    if IDENTITY in before and IDENTITY in identity and before[IDENTITY] != identity[IDENTITY]:
        changed.append(IDENTITY)
    takes_up = identity.get("spec.rollout.maxStaleness") or identity.get("spec.rollout.longRounds") != "Disabled"
    if not takes_up and identity.get("spec.prompts.lengthWindow", 0) < 2:
        changed.append("spec.rollout.maxStaleness")
    if not changed:
        return carried, []
    text = f"{len(carried)} samples that {checkpoint.folder} carries into later iterations are left out"
    return (), [f"{text}, because of another {', '.join(changed)}: their prompts come again in the next pass"]


def _records(checkpoint: Checkpoint) -> list[Record]:
    """Return the whole records of the file; empty without a file."""
    path = checkpoint.folder / FILE
    try:
        return [record for record, _ in unframe(path.read_bytes())]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error("the samples that a checkpoint carries", path, error, FIELD, "read") from error
