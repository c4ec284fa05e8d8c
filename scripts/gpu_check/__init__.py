"""`scripts/gpu-check`: show on one GPU, in nine minutes and without network, what the project claims.

Owns the command, what a bare machine needs, and the pytest plug-in of the steps. A step is a test in tests/gpu that
records figures through the fixture `figures`; docs/gpu.md says how to add one. Only `plugin` and `prepare` import more
than the standard library. The rest must never do so: it works and reports where nothing else is installed.
"""
