"""Training ranks: stages of Hugging Face models, a schedule table executed as data, optimizer, checkpoints.

Reading order: `training_role` executes commands with a backend (`backends`). `trainer` runs an iteration,
`schedule.executor` one row of a table.
"""
