"""Alerts as data: `families/` defines when each fires; other modules generate files of the chart and the docs."""
