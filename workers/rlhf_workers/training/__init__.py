"""Ranks that train: stages of Hugging Face models, a schedule table executed as data, optimizer, checkpoints.

Reading order: `training_role` obeys commands and asks a backend (`backends`). `trainer` runs an iteration,
`schedule.executor` one row of a table. `stages` cuts models, `batches` and `parallel` say which rank computes what,
`communication` crosses to other ranks, and `optimizers` steps. What makes an algorithm is in `rlhf_workers.algorithms`.
"""
