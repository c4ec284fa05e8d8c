"""The observed state of a job at one moment: its samples, its workers, the inputs of fusion, its constants.

It owns the states and their transitions: a sample is in exactly one state; a worker is missing, connected, broken or
lost.
Rule: plain data and pure state machines; the time is an argument. This package does not decide what to do
(`scheduling`), and reads no clock, file or socket.
"""
