"""The metrics that processes of the project serve to Prometheus, and the metrics of an iteration in its files.

  metric      types of a metric and a label
  labels      every label with its values
  buckets     bounds of histograms, by measured quantity
  process     of any process: its memory, processor, version
  operator    of the operator, and of every job from the operator's view
  job         of one job, from its coordinator: iterations, phases, use of time and GPUs
  samples     of its samples, and of the workers and messages behind them
  run         results of an iteration: reward, divergence, losses; metrics.jsonl and TensorBoard have the same numbers
  fusion      inter-stage fusion: threshold, pool, moves, predictions
  speculation drafts of all workers, and tokens shared for them
  training    steps, bubbles, schedules, the training group
  storage     weights, checkpoints, journal, disks
  worker      of one worker, from itself
  worker_drafts how its engine chooses drafts
  catalogue   all of them, by name
  exposition  their output for Prometheus
  page        docs/metrics.md, generated

Rule: a metric is declared once, in this package; exporters take its name, help, labels and buckets from here. Names,
labels and meanings are an interface: the successor of a wrong metric is served beside it for one version. A job's
process has no labels that identify the job: the scrape adds `namespace`, `rlhf_job` and `pod`. In this package only
`exposition` imports the Prometheus client.
"""
