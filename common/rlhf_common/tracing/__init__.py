"""Traces: spans, their ids, and their export by OTLP.

Rule: work does not wait for traces. Without an endpoint the exporter is not loaded.
"""
