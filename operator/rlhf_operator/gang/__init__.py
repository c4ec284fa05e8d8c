"""Gangs and queues: backends that place the pods of a job together.

`backend` has the interface, each backend has a module, and `registry` lists them. All modules but `discovery` are pure:
they derive the objects to apply, and the fields of pods, from the job, the served APIs and the state of a queue.
"""

from rlhf_operator.gang.apis import ServedApis
from rlhf_operator.gang.backend import GangBackend, GangChoice, QueueingBackend
from rlhf_operator.gang.choose import choose

__all__ = ["GangBackend", "GangChoice", "QueueingBackend", "ServedApis", "choose"]
