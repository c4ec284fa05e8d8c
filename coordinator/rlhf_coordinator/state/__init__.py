"""What is known of a job at one moment: its samples, its workers, what fusion goes by, its constants.

Owns the states and their transitions: a sample is in exactly one state, a worker is there, broken or lost.
Rule: plain data and pure state machines; the time comes in as an argument. What is inconsistent is refused here.
Must never decide what to do (`scheduling`), nor read a clock, a file or a socket. Gone with the process: the ledger
comes back from the journal, the rest from what workers say when they register.
"""
