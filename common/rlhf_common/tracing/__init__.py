"""Traces: what a span is, how its ids come about, and how spans leave a process by OTLP.

Rule: nothing waits for a trace. Spans are made of what a process knows anyway; where no endpoint is set nothing of this
is loaded, and nothing differs.
"""
