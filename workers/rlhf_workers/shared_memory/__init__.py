"""Memory that two processes of one machine both use, so that bytes need not go through a connection.

`regions` says what such memory is; `host_regions` and `cuda_regions` are the two kinds; `cuda_driver` is what they call
of the CUDA driver; `choice` says which kinds a worker has; `checksums` is how bytes are compared where they are, on a
device too. Rule: a region belongs to the process that allocated it, which says when it changes. Who borrows it only
reads. Nothing here knows what the bytes mean.
"""
