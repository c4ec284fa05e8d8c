"""Ranks that train: stages of Hugging Face models, a schedule table executed as data, optimizer, checkpoints.

Reading order: `training_role` obeys commands and asks a backend. `backends.torch_backend` is the one so far: `trainer`
runs an iteration, `executor` one row of a table, `model_stages` cuts models, `training_batch` and `minibatches` say
which rank computes what, and `communicator` is everything that crosses to another rank. What makes an algorithm is in
`rlhf_workers.algorithms`.
"""
