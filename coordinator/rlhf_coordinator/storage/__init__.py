"""What is on disk: the journal, checkpoints and prompts, and the way back from them.

Owns file formats, and the order in which bytes become durable.
Rule: a file is whole under its final name or it is not there; damage is found by its sum and named. What comes back
goes through the ledger, as it did the first time. Must never act on the running job: it knows none.
"""
