"""What is on disk: the journal, checkpoints and prompts, and the position that they say.

Owns file formats, and the order in which bytes become durable.
Rule: a file is whole under its final name or it is not there; damage is found by a checksum and named. What is read
back goes through the ledger, as it did the first time. Must never change the running job: it knows none.
"""
