"""The running job: its mutable parts, its metrics, and the sending of commands to workers.

It owns the `JobRun` that the packages above change, on the thread of the event loop.
Rule: this package stores, counts and sends; the scheduler decides. It does not import its callers.
"""
