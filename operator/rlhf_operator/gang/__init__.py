"""Gangs and queues: how a job's pods are placed together. One interface (`backend`), one module for each backend, one
`registry`.

Pure but for `discovery`: the job and what the cluster serves give the objects to apply and what pods carry.
"""

from rlhf_operator.gang.apis import ServedApis
from rlhf_operator.gang.backend import GangBackend, GangChoice, QueueingBackend
from rlhf_operator.gang.choose import choose

__all__ = ["GangBackend", "GangChoice", "QueueingBackend", "ServedApis", "choose"]
