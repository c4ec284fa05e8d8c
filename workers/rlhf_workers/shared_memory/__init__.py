"""Memory that two processes of one machine share, so that bytes need no connection.

`regions` is the interface; `host_regions` and `cuda_regions` are the two kinds; `cuda_driver` calls the CUDA driver;
`choice` selects the kinds of a worker; `checksums` sums bytes up on their own device. Rule: a region belongs to the
process that allocated it; borrowers only read it.
"""
