"""The files of a job: the journal, checkpoints and prompts, and the position that follows from them.

Rule: checksums detect damage in journal and checkpoints. This package does not import `job`.
"""
