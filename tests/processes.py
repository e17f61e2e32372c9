"""How tests start processes: one thread each, the tests' helpers at hand, no port that others could take."""

import os
import sys
from pathlib import Path

ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    "OMP_NUM_THREADS": "1",
}
# With --standalone the processes meet at a port that the system gives and that is kept from then on.
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
