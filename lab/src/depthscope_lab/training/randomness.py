"""Random numbers by name instead of by history: a run can be continued because nothing has to be remembered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch


def derived_seed(seed: int, *names: str | int) -> int:
    """A seed for one purpose, such as ("order", epoch): different names, unrelated numbers."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1  # 63 bits: what torch takes


def derived_generator(seed: int, *names: str | int) -> torch.Generator:
    """A generator on the CPU for one purpose."""
    return torch.Generator().manual_seed(derived_seed(seed, *names))


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """torch's global random state is set inside (for dropout and libraries that know no other) and restored after."""
    devices = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
