"""The scheduler: decides from the state what to do next (`iteration`).

Must never change the state, remember anything, or do any I/O.
"""
