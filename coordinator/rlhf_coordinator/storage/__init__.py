"""The files of a job: the journal, checkpoints and prompts, and the position that follows from them.

It owns file formats, and the order in which bytes become durable.
Rule: a checkpoint is complete under its final name or absent; checksums detect damage in journal and checkpoints.
Samples that are read back go through the ledger, as they did the first time. This package does not know the running
job.
"""
