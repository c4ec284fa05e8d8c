"""Dashboards and alerts of a running operator, as code that is checked before it becomes YAML or JSON.

Files of the chart are generated from it.
"""
