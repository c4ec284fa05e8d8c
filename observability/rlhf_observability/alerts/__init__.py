"""Alerts as data: `families/` defines when each fires; other modules generate the chart's files and tables of the docs.

Rule: an alert is defined in its family; `make alerts` generates chart, rule file, values, schema and tables of the docs
from it, and a test compares them. No operator or job runs this code.
"""
