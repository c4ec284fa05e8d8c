"""Imports large libraries with garbage collection switched off.

Importing torch and transformers creates many objects that live as long as the process. Collections during the import
would visit them repeatedly. Afterwards collection is on again if it was on before, and the objects that exist then are
frozen (`gc.freeze`), which shortens later collections.
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
