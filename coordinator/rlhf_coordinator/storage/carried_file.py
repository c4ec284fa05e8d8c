"""The file of carried samples in a checkpoint, written and read.

A checkpoint of version v holds the samples with which iteration v begins. They are one framed record, whose checksum is
among those of the checkpoint, so a new run folder that resumes from it loses nothing. `checkpoint.json` holds the part
of the job's identity (`SHAPE`) from which the prompts of these samples follow. Where that has changed the samples are
left out, with a warning.
Rule: the form of the record is that of the journal (`sample_codec`). Must never return a sample whose prompt would be
another one.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rlhf_coordinator.state.carried_sample import CarriedSample
from rlhf_coordinator.storage.checkpoint import Checkpoint
from rlhf_coordinator.storage.journal import frame, unframe
from rlhf_coordinator.storage.journal_pb2 import Begun, Record
from rlhf_coordinator.storage.sample_codec import carried_messages, carried_samples
from rlhf_coordinator.storage.tokenizer_files import IDENTITY

FILE: Final = "carried.log"
FACT: Final = "carries"
"""Of `checkpoint.json`: the identity of the job that carried them."""
SHAPE: Final = (
    "spec.seed",
    "spec.rollout.batchSize",
    "spec.rollout.oversample",
    "samples per prompt",
    "spec.prompts (settings and contents)",
    "spec.prompts.shuffle",
)
"""Of the identity of a job: by which a sample's prompt and key follow from where it was begun."""


def write(folder: Path, version: int, carried: Sequence[CarriedSample]) -> None:
    """Write what the iteration `version` begins with into the folder of a checkpoint. Raises OSError."""
    (folder / FILE).write_bytes(frame(Record(begun=Begun(iteration=version, carried=carried_messages(carried)))))


def read(checkpoint: Checkpoint, identity: Mapping[str, Any]) -> tuple[tuple[CarriedSample, ...], list[str]]:
    """Return what the iteration after a checkpoint begins with, and a sentence where something is left out.
    `identity`: of the job that goes on."""
    path = checkpoint.folder / FILE
    if not path.is_file():
        return (), []
    carried = carried_samples([record for record, _ in unframe(path.read_bytes())])
    before: dict[str, Any] = checkpoint.facts.get(FACT, {})
    changed = [name for name in SHAPE if before.get(name) != identity.get(name)]
    if IDENTITY in before and IDENTITY in identity and before[IDENTITY] != identity[IDENTITY]:
        changed.append(IDENTITY)
    if not identity.get("spec.rollout.maxStaleness"):
        changed.append("spec.rollout.maxStaleness")
    if not carried or not changed:
        return carried, []
    text = f"{len(carried)} samples that {checkpoint.folder} carries into the next iteration are left out"
    return (), [f"{text}, because of another {', '.join(changed)}: their prompts come again in the next pass"]
