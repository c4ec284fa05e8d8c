"""Traces: spans, their ids, and their export by OTLP.

Rule: work does not wait for traces; the end of a process waits for a bounded time. Spans are built from data that a
process has anyway. Without an endpoint the exporter is not loaded.
"""
