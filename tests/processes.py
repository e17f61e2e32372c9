"""How tests start processes: one thread each, the tests' helpers at hand, no port that others could take; and how
`compare` starts none.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "lab" / "tests"), os.environ.get("PYTHONPATH", "")]),
    "OMP_NUM_THREADS": "1",
}
# With --standalone the processes meet at a port that the system gives and that is kept from then on.
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def train_here() -> None:
    """From now on `compare` trains in this process: one of its own spends seconds on imports.

    That the numbers are those of other processes is what training/test_comparison.py shows.
    """
    from depthscope_lab.cli import compare
    from depthscope_lab.training.comparison import run_cells

    def run_here(cells: Any, launch: Any, watching: Any) -> Any:
        return run_cells(cells, replace(launch, in_process=True), watching)

    compare.run_cells = run_here
