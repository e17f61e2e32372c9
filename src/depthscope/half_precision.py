"""Whether this processor multiplies in bfloat16 and float16: some virtual machines announce AMX and kill what uses it.

The kernels are oneDNN's, which looks at the processor once, when it is first used. A variable that is set before then
keeps it from AMX.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

VARIABLE, WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"
_TRIAL = """
import torch
for dtype in (torch.bfloat16, torch.float16):
    x = torch.ones(2, 64, 64, dtype=dtype)
    torch.nn.functional.linear(x @ x, x[0], x[0, 0])
    torch.nn.functional.scaled_dot_product_attention(x, x, x)
"""
TRIAL = (sys.executable, "-c", _TRIAL)
_ILLEGAL_ON_WINDOWS = 0xC000001D


@cache
def require_half_precision() -> None:
    """Tries products in a process of its own. If it is killed, this process goes on without AMX, or the user is told.

    To be called before anything is multiplied. The answer is remembered, and what this process starts inherits it.
    """
    if not _is_killed(os.environ):
        return
    if _is_killed(os.environ | {VARIABLE: WITHOUT_AMX}):
        raise ValueError(
            "this processor kills programs that multiply in bfloat16 or float16, "
            f"also with {VARIABLE}={WITHOUT_AMX}; take float32"
        )
    os.environ[VARIABLE] = WITHOUT_AMX


def _is_killed(environment: os._Environ[str] | dict[str, str]) -> bool:
    code = subprocess.run(
        TRIAL, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
    ).returncode
    return code < 0 or code == _ILLEGAL_ON_WINDOWS  # any other error would also come, with its message, in the run
