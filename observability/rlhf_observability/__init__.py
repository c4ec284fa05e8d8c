"""Dashboards and alerts of jobs and the operator, as code that generates files of the chart and tables of the docs."""
