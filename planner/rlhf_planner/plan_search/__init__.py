"""Searches the groups, the placement and the layouts of a job for a number of devices, by a cost model.

    cost_document -> cost_figures -> training_seconds, engine_costs, publishing, context_switch, phase_memory
    workload, device_plan -> iteration_forecast -> training_choices, rollout_choices -> search, seeded_search

Rule: pure; the same job, costs and seed give the same plan. Every figure carries its source.
Must never start a process, read a clock, or change a field that changes what a job learns.
"""
