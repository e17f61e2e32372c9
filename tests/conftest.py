"""One thread: the tests' tensors are tiny, and threads only wait for each other there."""

import torch

torch.set_num_threads(1)
