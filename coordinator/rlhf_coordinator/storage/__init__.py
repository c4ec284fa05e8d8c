"""The files of a job: the journal, checkpoints and prompts, and the position that follows from them.

It owns file formats, and the order in which bytes become durable.
Rule: a file is complete under its final name or absent; a checksum detects damage, and the error names the file. Data
that is read back goes through the ledger, as it did the first time. This package does not know the running job.
"""
