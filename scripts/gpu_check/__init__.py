"""`scripts/gpu-check`: verifies the project's claims on one GPU, within a budget of time and without network.

Owns the command, the packages for a bare machine, and the pytest plug-in of the steps. A step is a test in tests/gpu
that records figures with the fixture `figures`; docs/gpu.md explains how to add one.
Rule: only `plugin` and `prepare` import more than the standard library. The other modules must work and report on a
machine where no package is installed.
"""
