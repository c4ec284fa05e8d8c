"""The scheduler: what to do next, given the state. Start at `iteration`, which reads like the loop that it is.

Owns every decision of a job but those that need a simulation or a search (`fusion`, `training`).
Rule: level-triggered; the same state and time always give the same decisions, and deciding again after they were
carried out gives none. Must never change the state, remember anything, or do any I/O.
"""
