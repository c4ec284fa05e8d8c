"""The running job: all its mutable parts, its numbers, and the one way by which commands leave for workers.

Owns the `JobRun` that the rooms above change, all on the thread of the event loop.
Rule: state only; who changes it says so. Must never decide, nor know who calls it.
"""
