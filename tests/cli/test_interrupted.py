"""Ctrl-C ends the program in one line and code 130, also while it is being imported and while it exits."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, os, signal, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == {importing!r} and self in sys.meta_path:
            sys.meta_path.remove(self)
            try:
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(1000): pass  # Python looks for signals here
            except BaseException:
                if not {swallowed}:
                    raise

{before}
sys.meta_path.insert(0, Interrupt())
{at_exit}
from depthscope.cli import main
sys.argv = ["depthscope", "demo", "--depth", "2"]
main()
"""


def interrupted(importing: str, *, swallowed: bool = False, before: str = "", at_exit: str = ""):
    code = PROGRAM.format(importing=importing, swallowed=swallowed, before=before, at_exit=at_exit)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("swallowed", [False, True])
@pytest.mark.parametrize("importing", ["typer", "depthscope_lab.cli.train"])
def test_while_the_program_is_imported(importing: str, swallowed: bool):
    done = interrupted(importing, swallowed=swallowed)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "depthscope: interrupted\n")


def test_while_a_command_imports_and_once_more_while_the_program_exits():
    again = "atexit.register(lambda: [os.kill(os.getpid(), signal.SIGINT), [0 for _ in range(1000)]])"
    done = interrupted("torch", at_exit=again)
    assert (done.returncode, done.stderr) == (130, "depthscope: interrupted\n")


def test_one_that_is_ignored_stays_ignored():
    done = interrupted("typer", before="signal.signal(signal.SIGINT, signal.SIG_IGN)")
    assert done.returncode == 0, done.stderr
