"""One thread, since the tests' tensors are tiny and threads only wait for each other; and Ctrl-C that works."""

import signal

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def interruptible():
    """A shell makes what runs in its background ignore SIGINT; the tests send it to themselves and to others."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
