"""Alerts as data: `families/` defines when each fires; `generated_files` makes files of the chart and the docs."""
