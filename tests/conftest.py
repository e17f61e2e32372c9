"""One thread per process, since the tests' tensors are tiny and threads only wait for each other; Ctrl-C that works."""

import os
import signal

import pytest
import torch

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start; this one has read it already


@pytest.fixture(autouse=True, scope="session")
def interruptible():
    """A shell makes what runs in its background ignore SIGINT; the tests send it to themselves and to others."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
