"""Carried samples on disk: in the segment of the iteration that takes them up, and in checkpoints.

A checkpoint of version v holds what iteration v begins with, in a file of one framed record, whose checksum is among
those of the checkpoint: a new run folder that resumes from it loses nothing. By what else the prompts of these samples
follow (`SHAPE` of the job's identity) is in `checkpoint.json`; where that has changed they are left out, which is said.
Rule: plain conversion, but for that comparison. Must never hand on a sample whose prompt would be another one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rlhf_api import control_pb2 as pb
from rlhf_api.samples import SampleKey
from rlhf_coordinator.state.carried_sample import CarriedSample
from rlhf_coordinator.state.sample import Origin, Sample
from rlhf_coordinator.storage.checkpoint import Checkpoint
from rlhf_coordinator.storage.journal import frame, unframe
from rlhf_coordinator.storage.journal_pb2 import Begun, Carried, Record
from rlhf_coordinator.storage.sample_codec import (
    episode_message,
    episode_of,
    key_message,
    packed,
    response_of,
    span_messages,
)
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


def messages(carried: Iterable[CarriedSample]) -> list[Carried]:
    """Return carried samples as they are written down."""
    return [_message(one) for one in carried]


def samples_in(records: Sequence[Record]) -> tuple[CarriedSample, ...]:
    """Return the samples with which the iteration of a segment began."""
    if not records or not records[0].HasField("begun"):
        return ()
    return tuple(_sample(message) for message in records[0].begun.carried)


def known(iteration: int, sample: Sample) -> Carried:
    """Return what is known of an unfinished sample that an iteration cuts off, as it is written down with the cut."""
    return _message(replace(CarriedSample.of(sample), origin=Origin(iteration, sample.index)))


def write(folder: Path, version: int, carried: Sequence[CarriedSample]) -> None:
    """Write what the iteration `version` begins with into the folder of a checkpoint. Raises OSError."""
    (folder / FILE).write_bytes(frame(Record(begun=Begun(iteration=version, carried=messages(carried)))))


def read(checkpoint: Checkpoint, identity: Mapping[str, Any]) -> tuple[tuple[CarriedSample, ...], list[str]]:
    """Return what the iteration after a checkpoint begins with, and a sentence where something is left out.
    `identity`: of the job that goes on."""
    path = checkpoint.folder / FILE
    if not path.is_file():
        return (), []
    carried = samples_in([record for record, _ in unframe(path.read_bytes())])
    before: dict[str, Any] = checkpoint.facts.get(FACT, {})
    changed = [name for name in SHAPE if before.get(name) != identity.get(name)]
    if IDENTITY in before and IDENTITY in identity and before[IDENTITY] != identity[IDENTITY]:
        changed.append(IDENTITY)
    if not identity.get("spec.rollout.maxStaleness"):
        changed.append("spec.rollout.maxStaleness")
    if not carried or not changed:
        return carried, []
    what = f"{len(carried)} samples that {checkpoint.folder} carries into the next iteration are left out"
    return (), [f"{what}, because of another {', '.join(changed)}: their prompts come again in the next pass"]


def _message(one: CarriedSample) -> Carried:
    response = one.response
    message = pb.FinishedSample(
        key=key_message(SampleKey(*one.origin, 0)),
        tokens=packed("int32", response.tokens),
        log_probabilities=packed("float32", response.log_probabilities),
        versions=span_messages(response.versions),
        finish_reason=one.finish_reason,
        text=one.text,
        drafted_tokens=one.drafted_tokens,
        accepted_tokens=one.accepted_tokens,
        episode=None if one.episode is None else episode_message(one.episode),
    )
    return Carried(response=message, decoded_by=one.decoded_by, restarted=one.restarted, failed=one.failed)


def _sample(message: Carried) -> CarriedSample:
    response = message.response
    return CarriedSample(
        Origin(response.key.iteration, response.key.sample),
        response_of(response.tokens, response.log_probabilities, response.versions),
        response.finish_reason,
        response.text,
        episode_of(response),
        tuple(message.decoded_by),
        response.drafted_tokens,
        response.accepted_tokens,
        message.restarted,
        message.failed,
    )
