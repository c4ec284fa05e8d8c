"""The coordinator of one job: a process that assigns the work of every worker and journals the results of samples.

Each package uses only the packages below it (checked: pyproject.toml, "The packages of the coordinator"):

  service                         gRPC, Prometheus, status, logs
  loop                            messages change the state, the scheduler decides on it, actions carry that out
  evaluation                      evaluation of weight versions during training
  fusion, training, speculation   mechanisms of several commands
  job                             one running job: its mutable state, commands to workers, metrics of an iteration
  scheduling                      pure: decisions from the state
  storage                         files that the job reads, and files that survive the process
  state                           pure: the known state of the samples, the workers and the job
  run_page                        the page of a run, read from its folder
  reports                         output of a run for people: trackers and figures
  failures.py                     the error that ends a job
"""
