"""The observed state of a job at one moment: its samples, its workers, the inputs of fusion, its constants.

Owns the states of samples and workers, and their transitions. Rule: plain data and pure state machines; the time is an
argument.
"""
