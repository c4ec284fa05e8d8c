"""The scheduler: decides from the state what to do next (`iteration`).

It owns the decisions of a job, except those that need a simulation or a search (`fusion`, `training`).
Rule: level-triggered; the same state and time give the same decisions, and a decision that was carried out is not made
again. Must never change the state, remember anything, or do any I/O.
"""
