"""Limits for the content of worker messages: numbers, counts, and lengths of names and texts.

Rule: pure; raises ValueError.
"""

import math
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor

from rlhf_common import control_pb2 as pb
from rlhf_common.names import Group
from rlhf_common.worker_roles import roles_of
from rlhf_coordinator.job.measurements import MAX_SECONDS
from rlhf_coordinator.state.worker import Worker

MAX_NAME_CHARACTERS: Final = 256
"""Longest text of most fields, in characters, such as names, addresses and attributes."""
MAX_TEXT_CHARACTERS: Final = 65536
"""Longest message about a failure, document of costs, or `parameters`, in characters."""
MAX_ENTRIES: Final = 100_000
"""Most entries of a list or a map."""
MAX_NUMBER: Final = 1e18
"""Largest number in a field of a message without another limit."""
MAX_SAMPLE_BYTES: Final = 2**40
"""Largest KV cache of a sample in bytes."""
MAX_GROUP_EPOCH: Final = 2**30
"""Largest epoch of a training group in a registration."""
_CHECKED: Final = frozenset({"register", "heartbeat", "done", "span", "prefix", "observation", "failed"})
"""Kinds of messages that are checked field by field."""
_ANY_NUMBER: Final = frozenset({"rlhf.v1.TrainResult.metrics", "rlhf.v1.Failure.exit_code"})
"""Fields that allow any number: a metric may be NaN, an exit code may be negative."""
_CLOCK_TIMES: Final = frozenset({"start_ns", "end_ns"})
"""Nanoseconds since 1970, which are above MAX_NUMBER today."""
_SINCE_START: Final = "busy_seconds"
"""Field with seconds since the start of a worker, perhaps more than a day."""
_LIMITS: Final = {"rlhf.v1.MigratedSample.bytes": MAX_SAMPLE_BYTES}
_TEXTS: Final = frozenset({"rlhf.v1.Failure.message", "rlhf.v1.TrainingCostsObservation.document"})
_ARRAYS: Final = frozenset({"rlhf.v1.Array", "rlhf.v1.SampleProgress"})
"""Messages that contain arrays; their form is checked when they are read."""
_FLOATS: Final = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)
_INTEGERS: Final = (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)


def check_message(worker: str, message: pb.WorkerMessage) -> None:
    """Raise ValueError for an impossible message of a kind in _CHECKED, with the field and its value."""
    kind = message.WhichOneof("message")
    if kind not in _CHECKED:
        return
    _fields(getattr(message, kind), kind)
    if kind == "span":
        _span(worker, message.span)
    elif kind == "observation":
        _observation(message.observation)
    elif kind == "done":
        _sample_arrays(message.done.train, "done.train")


def _sample_arrays(result: pb.TrainResult, place: str) -> None:
    """Raise ValueError unless the arrays of a result are absent, or float32 of one dimension with all their bytes."""
    arrays = {"advantages": result.advantages, "shaped_rewards": result.shaped_rewards}
    for name, array in arrays.items():
        if array.ByteSize() and (array.dtype != "float32" or list(array.shape) != [len(array.data) / 4]):
            shape = f"{array.dtype[:20]} {list(array.shape)[:4]} of {len(array.data)} bytes"
            raise ValueError(f"{place}.{name} is {shape}, must be float32 of one dimension with all its bytes")


def _span(worker: str, span: pb.Span) -> None:
    """Raise ValueError for a span of another worker, of negative length, or with a number outside 0 to MAX_NUMBER."""
    if span.worker != worker:
        raise ValueError(f"span.worker is {span.worker[:MAX_NAME_CHARACTERS]!r}, must be {worker!r}, who sends it")
    if span.end_ns < span.start_ns:
        raise ValueError(f"span.end_ns is {span.end_ns}, must not be before start_ns {span.start_ns}")
    for name, value in span.attributes.items():
        try:
            number = float(value)
        except ValueError:
            continue
        if not 0 <= number <= MAX_NUMBER:
            raise ValueError(f"span.attributes[{name}] is {value[:20]}, must be a number from 0 to {MAX_NUMBER:g}")


def _observation(observation: pb.Observation) -> None:
    if observation.end_ns < observation.start_ns:
        start_ns = observation.start_ns
        raise ValueError(f"observation.end_ns is {observation.end_ns}, must not be before start_ns {start_ns}")


def check_registration(worker: Worker | None, message: pb.Register, iterations: int) -> None:
    """Raise ValueError when a worker's registration is impossible or contradicts its place."""
    _fields(message, "register")
    state = message.state
    _sample_arrays(state.last_train, "register.state.last_train")
    roles = roles_of(state)
    if worker is not None and Group.TRAINING in roles and worker.rank is None:
        raise ValueError(f"state.roles is {', '.join(sorted(roles))}, and {worker.name} holds no training rank")
    for field, value in (("trained_version", state.trained_version), *state.versions.items()):
        if value > iterations:
            raise ValueError(f"state: version {value} of {field}, the job has {iterations} iterations")
    if state.group_epoch > MAX_GROUP_EPOCH:
        raise ValueError(f"state.group_epoch is {state.group_epoch}, must be at most {MAX_GROUP_EPOCH}")


def _fields(message: Any, place: str) -> None:
    for field, value in message.ListFields():
        if field.full_name in _ANY_NUMBER:
            continue
        inner = f"{place}.{field.name}"
        if not field.is_repeated:
            _value(field, value, inner)
            continue
        if len(value) > MAX_ENTRIES:
            raise ValueError(f"{inner} has {len(value)} entries, allowed are {MAX_ENTRIES}")
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            for name, mapped in value.items():
                _value(entry.fields_by_name["key"], name, f"{inner}: name")
                _value(entry.fields_by_name["value"], mapped, f"{inner}: value")
            continue
        for element in value:
            _value(field, element, inner)


def _value(field: Any, value: Any, place: str) -> None:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_MESSAGE:
        if field.message_type.full_name not in _ARRAYS:
            _fields(value, place)
    elif kind in (*_FLOATS, *_INTEGERS):
        _number(field, value, place)
    elif kind == FieldDescriptor.CPPTYPE_STRING:
        long = field.full_name in _TEXTS or field.name == "parameters"
        limit = MAX_TEXT_CHARACTERS if long else MAX_NAME_CHARACTERS
        if len(value) > limit:
            raise ValueError(f"{place} has {len(value)} characters, allowed are {limit}")


def _number(field: Any, value: float, place: str) -> None:
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{place} is {value}, must be a number from 0")
    if value > (limit := _limit(field)):
        raise ValueError(f"{place} is {value}, must be at most {limit:g}")


def _limit(field: Any) -> float:
    """Return the largest valid value of a field with a number."""
    if field.name in _CLOCK_TIMES:
        return math.inf
    if field.name.endswith("seconds") and field.name != _SINCE_START:
        return MAX_SECONDS
    return _LIMITS.get(field.full_name, MAX_NUMBER)
