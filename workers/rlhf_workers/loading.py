"""Imports large libraries with garbage collection switched off.

Importing torch and transformers creates hundreds of thousands of objects that live as long as the process. Collections
during the import visit them repeatedly, about an eighth of its CPU time. Afterwards collection is on again, and the
imported objects are frozen (`gc.freeze`), which shortens later collections.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection inside; exclude the objects made so far from later collections."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
