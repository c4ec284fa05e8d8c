"""Alerts as data: `families/` says when each fires, other modules write the chart's files and tables of the docs of it.

Rule: an alert exists once, in its family; chart, rule file, values, schema and tables of the docs are written of it by
`make alerts`, and a test compares. Nothing here is run by an operator or a job.
"""
