"""Traces: spans, their ids, and their export by OTLP.

Rule: nothing waits for a trace. Spans are built from data that a process has anyway. Without an endpoint the exporter
is not loaded and nothing else changes.
"""
