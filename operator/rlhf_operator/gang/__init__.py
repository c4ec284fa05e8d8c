"""Gangs and queues: how a job's pods are placed together, one interface, one file a backend.

Pure but for `discovery`: the job and what the cluster serves give the objects to apply and what pods carry.
"""

from rlhf_operator.gang.apis import Served
from rlhf_operator.gang.backend import GangBackend, GangChoice
from rlhf_operator.gang.choose import choose

__all__ = ["GangBackend", "GangChoice", "Served", "choose"]
