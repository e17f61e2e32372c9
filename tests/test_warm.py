"""A process that begins with its imports done is a process like others: arguments, folder, streams, exit code."""

import os
import signal
from pathlib import Path

from warm import run_warm

SAYS = """
import os, sys
print(os.getcwd(), os.environ["TOLD"], sys.argv[1:], "torch" in sys.modules, "depthscope" in sys.modules)
print("é", file=sys.stderr)
sys.exit(3)
"""


def test_it_has_what_it_was_told_and_nothing_of_ours(tmp_path: Path):
    done = run_warm("-c", SAYS, "a", env=os.environ | {"TOLD": "this"}, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (3, f"{tmp_path} this ['a'] True False\n", "é\n")


def test_killed_it_says_so():
    done = run_warm("-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", env=os.environ)
    assert done.returncode == -signal.SIGKILL
