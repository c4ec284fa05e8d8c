"""The metrics that the processes of the project serve to Prometheus, and those that an iteration leaves in its files.

  metric      what a metric and a label are
  labels      every label, with what it may be
  buckets     bounds of histograms, by what they measure
  process     of any process: its memory, processor, version
  operator    of the operator, and of every job as the operator sees it
  job         of one job by its coordinator: iterations, phases, where time and GPUs go
  samples     of its samples, and the workers and messages that they come by
  run         what an iteration came to: reward, divergence, losses; metrics.jsonl and TensorBoard have the same numbers
  fusion      inter-stage fusion: threshold, pool, moves, predictions
  training    steps, bubbles, schedules, the training group
  storage     weights, checkpoints, journal, disks
  worker      of one worker by itself
  catalogue   all of them, by name
  exposition  how they are written for Prometheus
  page        docs/metrics.md, generated

Rule: a metric is declared once, here; exporters take its name, help, labels and buckets from here and write no name of
their own. Names, labels and meanings are an interface: one that is wrong gets a successor and is served beside it for
one version. What tells a job from another is no label of a job's process: the scrape adds `namespace`, `rlhf_job` and
`pod`, which no code of a user can forge. Only `exposition` knows the client of Prometheus; the rest reads nothing.
"""
