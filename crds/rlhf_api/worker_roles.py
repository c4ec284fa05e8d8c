"""The roles of a worker on the wire: what it does (generation, inference, training), not what a model is (actor, ...).

Rule: who writes fills the enum and the text of earlier versions; who reads takes the enum, and the text only where a
neighbour of an earlier version sent no enum. A role that this version does not know is refused, never dropped.
"""

from collections.abc import Collection, Mapping
from typing import Final

from rlhf_api import control_pb2 as pb
from rlhf_api.names import Group

SEPARATOR: Final = "+"
"""Between several roles in the text of earlier versions."""
WIRE: Final[Mapping[Group, "pb.WorkerRole.ValueType"]] = {
    Group.GENERATION: pb.WORKER_ROLE_GENERATION,
    Group.INFERENCE: pb.WORKER_ROLE_INFERENCE,
    Group.TRAINING: pb.WORKER_ROLE_TRAINING,
}
"""Each role has the name of the group whose workers begin with it."""
_ROLES: Final = {number: role for role, number in WIRE.items()}
_NAMES: Final = ", ".join(WIRE)


def roles_of(state: pb.WorkerState) -> frozenset[Group]:
    """Return the roles that a worker holds; ValueError names one that is not known."""
    if state.roles:
        unknown = [number for number in state.roles if number not in _ROLES]
        if unknown:
            raise ValueError(f"state.roles holds {unknown[0]}, must be of {_NAMES}")
        return frozenset(_ROLES[number] for number in state.roles)
    names = [name for name in state.role.split(SEPARATOR) if name]
    if not set(names) <= set(WIRE):
        raise ValueError(f"state.role is {state.role!r}, must be of {_NAMES}")
    return frozenset(Group(name) for name in names)


def write_roles(state: pb.WorkerState, roles: Collection[str]) -> None:
    """Fill in the roles of a worker, as the enum and as text."""
    held = sorted(roles)
    state.role = SEPARATOR.join(held)
    del state.roles[:]
    state.roles.extend(WIRE[Group(role)] for role in held)
