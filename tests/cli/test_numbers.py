"""Every option that is a number has bounds: what nobody can compute with ends in one line, and at once."""

from pathlib import Path

import pytest
import typer

from depthscope import memory
from depthscope.cli.app import app

HUGE = "9" * 309  # no float holds it
TINY = ("encoder", "--depth", "2", "--width", "16", "--heads", "2")
COMMANDS = {  # something quick that each of them would do
    "compare": ("vit-digits", "--cpu", "--dry-run"),
    "demo": (),
    "depth": (*TINY, "--tokens", "8", "--samples", "2"),
    "fix": (*TINY, "--tokens", "8", "--samples", "2"),
    "paths": (*TINY, "--tokens", "8", "--samples", "2"),
    "probe": (*TINY, "--tokens", "8", "--samples", "2"),
    "reproduce": ("yu2024-rate", "--quick"),
    "spectra": TINY,
    "train": ("vit-digits", "--cpu", "--dry-run"),
}
NONE_OF = {int: (HUGE, str(2**63), "-1", "1.5"), float: (HUGE, "nan", "inf", "1e400", "-1")}


def numbers() -> list[tuple[str, str, type]]:
    """Command, option, kind, of all that are declared."""
    commands = typer.main.get_command(app).commands
    return [
        (name, parameter.opts[0], kind)
        for name, command in sorted(commands.items())
        for parameter in command.params
        if parameter.opts[0].startswith("--") and hasattr(parameter, "type_descriptor")
        if (kind := parameter.type_descriptor.annotation) in NONE_OF
    ]


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)


def refused(program, *arguments: str) -> str:
    printed = program(*arguments, code=2)
    assert (printed.out, printed.err.count("\n")) == ("", 1), printed
    assert printed.err.startswith("depthscope: ")
    return printed.err


def test_there_are_such_options():
    assert ("probe", "--tokens", int) in numbers()
    assert ("fix", "--alpha", float) in numbers()


@pytest.mark.parametrize(("command", "option", "kind"), numbers())
def test_what_no_machine_computes_with_is_refused(command: str, option: str, kind: type, program):
    for value in NONE_OF[kind]:
        refused(program, command, *COMMANDS[command], f"{option}={value}")


@pytest.mark.parametrize(
    "option",
    [
        *(f"--set={name}={HUGE}" for name in ("heads", "warmup_steps", "beta1", "drop_at", "clip_norm")),
        *(f"--set={name}={value}" for name in ("weight_decay", "drop_at") for value in ("nan", "inf", "1e400", "-1")),
        *(f"--stop-if=token_similarity>{value}" for value in ("nan", f"0.9 for {HUGE}", f"0.9 at block {HUGE}")),
        *(f"--variant=post+de-escalation(tau={value})" for value in (HUGE, "nan", "1e400", "-1")),
        *(f"--variant=post+de-escalation(mixing=Ema(decay={value}))" for value in (HUGE, "nan", "-1")),
        f"--variant=post+de-escalation(leave_alone=[{HUGE}])",
        *(f"--variant=post+residual-weight(alpha={value})" for value in (HUGE, "1e308", "inf")),
        *(f"--variant=post+mv-split(beta={value})" for value in (HUGE, "1e308", "nan")),
        f"--variant=post+reparameterise(interval=[{HUGE}, 0])",
        f"--variant=post+mv-split(every={HUGE}.0)",
    ],
)
def test_so_are_numbers_inside_of_words(option: str, program):
    refused(program, "train", *COMMANDS["train"], option)


@pytest.mark.parametrize(
    "option", ["--tau=nan", f"--tau={HUGE}", "--fail-on=token_similarity>nan", f"--exclude-tokens={HUGE}"]
)
def test_and_those_of_other_commands(option: str, program):
    command = "fix" if "tau" in option else "probe"
    refused(program, command, *COMMANDS[command], option)


def test_sizes_beyond_a_float_are_refused_like_large_ones():
    for ask in (
        lambda: memory.require_memory(int(HUGE), what="a model"),
        lambda: memory.require_memory(0, what="a model", blocks=int(HUGE)),
        lambda: memory.require_room(int(HUGE), "a model", "give fewer"),
    ):
        with pytest.raises(ValueError, match="sizes that torch can count with, got a model"):
            ask()
