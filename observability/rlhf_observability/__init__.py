"""What people see of a running operator: dashboards and alerts, as code that is checked before it is YAML or JSON.

Rule: every series is named by the catalogue of `rlhf_common.metrics`, so a name or label that no process serves fails
here and not on a screen at night. Files of the chart are written from it; nothing of it is in an image or in the wheel.
"""
