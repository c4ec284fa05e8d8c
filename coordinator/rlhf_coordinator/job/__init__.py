"""The running job: its mutable parts, its metrics, and the sending of commands to workers."""
