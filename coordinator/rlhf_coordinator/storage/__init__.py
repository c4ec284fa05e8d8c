"""The files of a job: the journal, checkpoints and prompts, and the position that follows from them.

Rule: checksums detect damage in segments of the journal and in checkpoints. This package does not import `job`.
"""
