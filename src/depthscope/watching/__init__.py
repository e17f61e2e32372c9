"""Depth while a model is trained: measured in any loop, written down step by step, drawn as block × step.

`DepthCallback` makes the callback for Hugging Face's Trainer (`huggingface`) or for Lightning's (`lightning`).
"""

from depthscope.watching.callbacks import DepthCallback
from depthscope.watching.gate import Alarm, DepthAlarm
from depthscope.watching.options import watch
from depthscope.watching.records import load_records
from depthscope.watching.watcher import Watch

__all__ = ["Alarm", "DepthAlarm", "DepthCallback", "Watch", "load_records", "watch"]
