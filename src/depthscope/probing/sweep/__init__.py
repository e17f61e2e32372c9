"""One sweep over the tokens of a station: all numbers of the default profile, by the fastest form that fits.

| form     | where                                                 | how                                             |
| -------- | ----------------------------------------------------- | ----------------------------------------------- |
| `kernel` | float32 and half precision on the CPU, with numba     | compiled loops, sums in float64 (`kernel.py`)   |
| `eager`  | the same without numba                                | a dozen operations of PyTorch (`eager.py`)      |
| `device` | float32 and half precision on a GPU                   | without a question to the device (`device.py`)  |
| `exact`  | float64, tokens of extreme size, subclasses of Tensor | `TokenMatrix`, which all others are tested with |

They agree to the rounding of the tokens' format; the profile's metadata says which ones ran (`arithmetic`).
"""

from __future__ import annotations

from depthscope.probing.sweep.sweeper import FIELDS, Kept, Sweeper, Swept

__all__ = ["FIELDS", "Kept", "Sweeper", "Swept"]
