"""The metrics that processes of the project serve to Prometheus.

  metric         types of a metric and a label
  labels         labels with their values
  buckets        bounds of histograms
  process        metrics of several kinds of processes
  operator       of the operator, and of jobs from its view
  job            of one job: iterations, phases, use of time and GPUs
  samples        of its samples, and of the workers and messages behind them
  run            results of an iteration, such as reward and losses
  fusion         inter-stage fusion
  speculation    drafts of all workers, and tokens shared for them
  training       steps, schedules, the training group
  storage        weights, checkpoints, trackers, the journal, disks
  worker         of one worker, from itself
  worker_drafts  how its engine chooses drafts
  catalogue      all of them, by name
  exposition     their output for Prometheus
  page           generates docs/metrics.md

Rule: a metric is declared once, in this package. In this package only `exposition` imports the Prometheus client.
"""
