"""Depth while a model is trained: measured in any loop, written down step by step, drawn as block × step.

`DepthCallback` for Hugging Face's Trainer is in `huggingface`, that for Lightning in `lightning`.
"""

from depthscope.probing.watching.records import load_records
from depthscope.probing.watching.watcher import Watch, watch

__all__ = ["Watch", "load_records", "watch"]
