"""Dashboards and alerts of a running operator, as code that is checked before it becomes YAML or JSON.

Rule: series come from the catalogue of `rlhf_common.metrics`, so a name or label that no process serves fails at import
or in a test. Files of the chart are generated from it.
"""
