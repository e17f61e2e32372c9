"""What every thread has for itself: a model may be called from several at once."""

from __future__ import annotations

import threading
from typing import Any


class ByThread(threading.local):
    """Each thread that looks at it finds its own, made by `__init__` without arguments. A copy of it, or what is
    unpickled, is as if no thread had looked yet. `torch.compile` traces it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()
