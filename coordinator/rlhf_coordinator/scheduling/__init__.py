"""What is to be done, given the world: pure functions that `iteration.decide` calls in turn.

Owns every decision of a job but those that need a simulation or a search (`fusion`, `training`).
Rule: level-triggered; the same world and time always give the same decisions, and deciding again after they were
carried out gives none. Must never change the world, remember anything, or do any I/O.
"""
