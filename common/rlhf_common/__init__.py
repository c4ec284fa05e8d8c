"""What processes share: names, wire messages, samples, channels, logs, traces, metrics, and readers of model files.

It must never import torch, kopf, or any of our other packages.
"""
