"""Another device, pretended: its tests run in a process of their own, for PyTorch does not forget a device."""

import subprocess
import sys
from pathlib import Path

from processes import ENVIRONMENT


def test_all_goes_well_on_another_device():
    file = Path(__file__).with_name("on_another_device.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", str(file)]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
