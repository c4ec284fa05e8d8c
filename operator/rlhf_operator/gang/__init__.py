"""Gangs and queues: backends that place the pods of a job together.

Rule: `discovery` asks the API server; the other modules are pure.
"""

from rlhf_operator.gang.apis import ServedApis
from rlhf_operator.gang.backend import GangBackend, GangChoice, QueueingBackend
from rlhf_operator.gang.choose import choose

__all__ = ["GangBackend", "GangChoice", "QueueingBackend", "ServedApis", "choose"]
