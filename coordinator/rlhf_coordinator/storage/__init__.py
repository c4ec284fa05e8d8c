"""The files of a job: the journal, checkpoints and prompts, and the position that follows from them.

Checksums detect damage in segments of the journal and in checkpoints. Must never import `job`.
"""
