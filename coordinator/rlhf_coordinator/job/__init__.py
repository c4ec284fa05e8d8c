"""The running job: all its mutable parts, its metrics, and the one way by which commands leave for workers.

Owns the `JobRun` that the packages above change, on the thread of the event loop.
Rule: it holds, counts and sends; the scheduler decides, and whoever changes the state says so. It knows no caller.
"""
