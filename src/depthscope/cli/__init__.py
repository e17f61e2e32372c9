"""The command line: one thin file per command. Nothing heavy is imported before a command runs."""

from depthscope.cli.app import main

__all__ = ["main"]
