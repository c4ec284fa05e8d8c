"""The contract: the manifest that users write, its rules, and the data that processes share about a job.

Must never import torch, nor any package of this project other than `rlhf_common` (import-linter checks).
"""
