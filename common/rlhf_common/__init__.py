"""Code that processes share, such as names, messages, logs, metrics, and readers of model files.

It must never import torch, kopf, or another package of this project (import-linter checks).
"""
