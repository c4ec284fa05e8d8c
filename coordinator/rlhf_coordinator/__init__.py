"""The coordinator of one job: a process that says what every worker does next, and forgets nothing.

Its rooms, each of which may use only those below it (checked: pyproject.toml, "The rooms of the coordinator"):

  service           what is outside sees and calls: gRPC, metrics, log
  loop              a message changes the world, the world is decided on, decisions are carried out
  fusion, training  what takes more than one command: moving a tail, choosing a schedule, saving a checkpoint
  job               one running job: all that changes, in one place, and its way out to the workers
  deciding          pure: the world in, decisions out
  storage           what is read from disk and what survives the process
  world             pure: what is known of the samples, the workers and the job at one moment
  failures.py       the error that ends a job
"""
