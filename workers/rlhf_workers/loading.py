"""Loading large libraries without the garbage collector in the way.

Importing torch and transformers makes hundreds of thousands of objects that live as long as the process; collections
during the import walk them again and again, about an eighth of its CPU time. Rule: the collector is on again
afterwards, and what the import made is never walked later (`gc.freeze`), which keeps later collections short.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection inside; what was made stays out of later ones."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
