"""The roles of a worker in messages: its work (generation, inference, training), not the role of a model (actor, ...).

Rule: reading an unknown role raises an error.
"""

from collections.abc import Collection, Mapping
from typing import Final

from rlhf_common import control_pb2 as pb
from rlhf_common.names import Group

WIRE: Final[Mapping[Group, "pb.WorkerRole.ValueType"]] = {
    Group.GENERATION: pb.WORKER_ROLE_GENERATION,
    Group.INFERENCE: pb.WORKER_ROLE_INFERENCE,
    Group.TRAINING: pb.WORKER_ROLE_TRAINING,
}
"""Role of a worker -> its value in messages; names are those of the groups."""
_ROLES: Final = {number: role for role, number in WIRE.items()}
_NAMES: Final = ", ".join(WIRE)


def roles_of(state: pb.WorkerState) -> frozenset[Group]:
    """Return the roles that a worker holds. Raises ValueError for an unknown role."""
    unknown = [number for number in state.roles if number not in _ROLES]
    if unknown:
        raise ValueError(f"state.roles holds {unknown[0]}, must be of {_NAMES}")
    return frozenset(_ROLES[number] for number in state.roles)


def write_roles(state: pb.WorkerState, roles: Collection[str]) -> None:
    """Set the roles of a worker in its state."""
    del state.roles[:]
    state.roles.extend(WIRE[Group(role)] for role in sorted(roles))
