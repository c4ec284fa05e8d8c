"""The coordinator of one job: a process that says what every worker does next, and journals every result.

Its packages, each of which may use only those below it (checked: pyproject.toml, "The packages of the coordinator"):

  service           what the outside sees and calls: gRPC, Prometheus, status, logs
  loop              a message changes the state, the state is decided on, decisions are carried out
  fusion, training  what takes more than one command: moving samples, choosing a schedule, saving a checkpoint
  job               one running job: all that changes, in one place; commands to workers; metrics of an iteration
  scheduling        pure: the state in, decisions out
  storage           what is read from disk and what survives the process
  state             pure: what is known of the samples, the workers and the job at one moment
  reports           what a run leaves for people: trackers, and figures of a finished run
  failures.py       the error that ends a job
"""
