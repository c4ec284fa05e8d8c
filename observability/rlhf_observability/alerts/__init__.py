"""Alerts as data: `families/` defines when each fires; other modules generate the chart's files and tables of the docs.

Rule: an alert is defined in its family; `make alerts` generates the chart's data, rule file, values, schema and the
tables of the docs from it.
"""
