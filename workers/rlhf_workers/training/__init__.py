"""Ranks that train: stages of Hugging Face models, a schedule table executed as data, optimizer, checkpoints.

Reading order: `role` obeys commands; `trainer` runs one iteration; `executor` runs one row of a table; `stages` cuts
models; `batch` and `minibatches` say which rank computes what; `peers` is everything that crosses to another rank.
"""
