"""Malformed messages of control.proto: valid ones with changed fields, truncated bytes, or unknown fields."""

import random
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor as Field

from rlhf_common import control_pb2 as pb

_INTEGERS: Final = (0, 1, -1, 7, 2**31 - 1, -(2**31))
_FLOATS: Final = (0.0, -1.0, 0.5, 1e308, float("nan"), float("inf"), float("-inf"))
_TEXTS: Final = ("", "training", "generation-2", "²", "x" * 5000, "\x00", "../../etc", "score/reward", "nan", "9" * 400)
_LIMITS: Final = {
    Field.CPPTYPE_INT64: (2**63 - 1, -(2**63)),
    Field.CPPTYPE_UINT64: (0, 2**63, 2**64 - 1),
    Field.CPPTYPE_UINT32: (0, 2**32 - 1),
}


def _scalar(rng: random.Random, field: Any) -> Any:
    kind = field.cpp_type
    if kind in (Field.CPPTYPE_DOUBLE, Field.CPPTYPE_FLOAT):
        return rng.choice(_FLOATS)
    if kind == Field.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == Field.CPPTYPE_STRING:
        text = rng.choice(_TEXTS)
        return text.encode() if field.type == Field.TYPE_BYTES else text
    if kind in (Field.CPPTYPE_UINT64, Field.CPPTYPE_UINT32):
        return rng.choice(_LIMITS[kind])
    return rng.choice((*_INTEGERS, *_LIMITS.get(kind, ())))


def changed(rng: random.Random, message: Any, depth: int = 0) -> None:
    """Change one field somewhere in the message."""
    if not message.DESCRIPTOR.fields:
        return
    field = rng.choice(message.DESCRIPTOR.fields)
    if field.is_repeated:
        _repeated(rng, message, field, depth)
    elif field.cpp_type == Field.CPPTYPE_MESSAGE:
        if depth < 6:
            inner = getattr(message, field.name)
            inner.SetInParent()
            changed(rng, inner, depth + 1)
    elif rng.random() < 0.2:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _scalar(rng, field))


def _repeated(rng: random.Random, message: Any, field: Any, depth: int) -> None:
    values, entry = getattr(message, field.name), field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        key = _scalar(rng, entry.fields_by_name["key"])
        value = entry.fields_by_name["value"]
        if value.cpp_type != Field.CPPTYPE_MESSAGE:
            values[key] = _scalar(rng, value)
    elif entry is None:
        values.extend([_scalar(rng, field)] * rng.choice((1, 3, 1000)))
    elif depth < 6:
        changed(rng, values.add(), depth + 1)


def bytes_of(rng: random.Random, message: Any) -> bytes:
    """Return the message with one to four changes, serialised, perhaps with damaged bytes."""
    for _ in range(rng.randint(1, 4)):
        changed(rng, message)
    data: bytes = message.SerializeToString()
    roll = rng.random()
    if roll < 0.1:
        return data[: rng.randrange(len(data) + 1)]
    if roll < 0.2:
        return data + b"\xba\x3e\x03abc"  # field 999
    if roll < 0.25:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(40)))
    return data


def observation(index: int, **work: Any) -> pb.Observation:
    """Return an observation of four nanoseconds."""
    return pb.Observation(start_ns=1, end_ns=5, iteration=index % 3, **work)


def worker_messages(index: int) -> list[pb.WorkerMessage]:
    """Return the messages that a worker without state may send; it has no sample and no command to answer."""
    array = pb.Array(dtype="int32", shape=[2], data=b"\1\0\0\0\2\0\0\0")
    floats = pb.Array(dtype="float32", shape=[2], data=b"\0" * 8)
    key = pb.SampleKey(iteration=index % 3, sample=index % 16, attempt=1 + index % 2)
    spans = [pb.VersionSpan(version=index % 3, tokens=2)]
    progress = pb.SampleProgress(key=key, tokens=array, log_probabilities=floats, versions=spans)
    finished = pb.FinishedSample(key=key, tokens=array, log_probabilities=floats, versions=spans, finish_reason="stop")
    span = pb.Span(worker="generation-2", name="decode", start_ns=1, end_ns=5, attributes={"rows": "1", "steps": "2"})
    decode = pb.DecodeObservation(steps=2, rows_per_step=1.5, keys_per_row=30, prefill_seconds=1e-9)
    rebuild = pb.RebuildObservation(passes=1, rows_per_pass=1, tokens_per_row=9, seconds=1e-9)
    scoring = pb.ScoringObservation(task="reward", samples=1, tokens=9)
    return [
        pb.WorkerMessage(observation=observation(index, decode=decode)),
        pb.WorkerMessage(observation=observation(index, rebuild=rebuild)),
        pb.WorkerMessage(observation=observation(index, scoring=scoring)),
        pb.WorkerMessage(observation=observation(index, onload=pb.OnloadObservation(role="training"))),
        pb.WorkerMessage(heartbeat=pb.Heartbeat(tokens=3, busy_seconds=0.5)),
        pb.WorkerMessage(progress=progress),
        pb.WorkerMessage(finished=finished),
        pb.WorkerMessage(scored=pb.ScoredSample(key=key, task="reward", result=floats)),
        pb.WorkerMessage(done=pb.CommandDone(command_id=2**63, load=pb.LoadResult(version=1))),
        pb.WorkerMessage(span=span),
        pb.WorkerMessage(prefix=pb.ScoredPrefix(key=key, tokens=1, dropped=[1])),
        pb.WorkerMessage(batch=pb.Batch(messages=[pb.WorkerMessage(span=span), pb.WorkerMessage(progress=progress)])),
    ]


def register(index: int) -> pb.Register:
    """Return the registration of a worker that the job expects and that is not started."""
    incarnation = f"stranger-{index}"
    return pb.Register(
        worker="generation-2", group="generation", index=2, incarnation=incarnation, address="nowhere:1", protocol=1
    )
