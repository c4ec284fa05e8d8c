"""The coordinator of one job: a process that says what every worker does next, and forgets nothing.

Its packages, each of which may use only those below it (checked: pyproject.toml, "The packages of the coordinator"):

  service           what is outside sees and calls: gRPC, metrics, log
  loop              a message changes the state, the state is decided on, decisions are carried out
  fusion, training  what takes more than one command: moving a tail, choosing a schedule, saving a checkpoint
  job               one running job: all that changes, in one place, and its way out to the workers
  scheduling        pure: the state in, decisions out
  storage           what is read from disk and what survives the process
  state             pure: what is known of the samples, the workers and the job at one moment
  failures.py       the error that ends a job
"""
