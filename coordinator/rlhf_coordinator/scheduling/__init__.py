"""The scheduler: decides from the state what to do next (`iteration`).

The same state and time give the same decisions. Must never change the state, remember anything, or do any I/O.
"""
