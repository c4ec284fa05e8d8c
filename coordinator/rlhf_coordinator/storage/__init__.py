"""The files of a job: the journal, checkpoints and prompts, and the position that follows from them.

Must never import `job`.
"""
