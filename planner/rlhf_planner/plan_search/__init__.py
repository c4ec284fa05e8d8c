"""Searches the groups, the placement and the layouts of a job for a number of devices, by a cost model.

Rule: pure; the same job, costs and seed give the same plan. Must never change a field that changes what a job learns.
"""
