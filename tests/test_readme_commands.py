"""The README's commands run, and print what it says."""

import sys
from pathlib import Path

import pytest
import typer

from depthscope.cli.app import main
from pages import parse, reason_to_parse_only
from readme import Shown, commands_in, difference

README = (Path(__file__).parents[1] / "README.md").read_text()
COMMANDS = commands_in(README)


def reason_not_to_run(command: Shown) -> str | None:
    return reason_to_parse_only(command.arguments)


def test_the_readme_has_commands():
    assert len(COMMANDS) >= 3
    assert any(command.text for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_and_its_options_exist(command: Shown):
    assert parse(command.arguments) == command.arguments[0]


@pytest.mark.parametrize("command", [c for c in COMMANDS if reason_not_to_run(c) is None], ids=str)
def test_a_command_prints_what_the_readme_says(
    command: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["depthscope", *command.arguments])
    with pytest.raises(SystemExit) as exit:
        main()
    printed = capsys.readouterr()
    assert exit.value.code == 0, printed.err
    assert printed.out.strip()
    found = None if command.text is None else difference(command.text, printed.out)
    assert found is None, found


def test_what_is_shown_is_run():
    assert [str(c) for c in COMMANDS if c.text is not None and reason_not_to_run(c) is not None] == []


# --- the comparison itself, with mutants ----------------------------------------------------------

PRINTED = """
bert · 12 blocks

Verdict: no collapse. The tokens stay different: 0.363 at the entrance, 0.661 at block 12.
- Directions left: 109.1, then 92.0.
- The odds grow by a factor of 3.42.
What to do: nothing.
"""


def shown_in(text: str) -> str:
    """What a README with this text after its command shows."""
    made_up = f"# x\n\n```bash\ndepthscope probe bert   # a comment\n```\n\nwords\n\n```text\n{text}```\n"
    (command,) = commands_in(made_up)
    assert command.arguments == ("probe", "bert")
    assert command.text is not None
    return command.text


@pytest.mark.parametrize(
    "text",
    [
        PRINTED,
        PRINTED.replace("entrance, ", "entrance,\n"),  # wrapped elsewhere
        PRINTED.replace("0.661", "0.662"),  # the last digit of another processor
        "…\n" + PRINTED.partition("\n\n")[2],
        "bert · 12 blocks\n…\n- The odds grow by a factor of 3.42.\n…\n",
        "…\nVerdict: no collapse. The tokens stay different: 0.363\n…\n",
    ],
)
def test_what_was_printed_is_accepted(text: str):
    assert difference(shown_in(text), PRINTED) is None


@pytest.mark.parametrize(
    "text",
    [
        PRINTED.replace("0.661", "0.663"),  # a wrong number
        PRINTED.replace("block 12.", "block 13."),
        PRINTED.replace("12 blocks", "11 blocks"),
        PRINTED.replace("- Directions left: 109.1, then 92.0.\n", ""),  # a lost finding in the middle,
        PRINTED.replace("What to do: nothing.\n", ""),  # at the end,
        PRINTED.partition("\n\n")[2],  # at the beginning
        PRINTED.replace("What to do", "- A finding that was not made.\nWhat to do"),
        PRINTED.replace("no collapse", "collapsed"),
        "…\n- The odds grow by a factor of 3.42.\n…\nVerdict: no collapse.\n…\n",  # in another order
        "…\n- The odds grow by a factor of 3.42.\n",
        "",
    ],
)
def test_what_was_not_printed_is_refused(text: str):
    assert difference(shown_in(text), PRINTED) is not None


def test_the_place_of_a_difference_is_said():
    said = difference(PRINTED.replace("3.42", "4.32"), PRINTED)
    assert said == (
        "after '- The odds grow by a factor of' README has '4.32. What to do: nothing.', "
        "printed was '3.42. What to do: nothing.'"
    )


def test_a_text_without_a_command_is_refused():
    with pytest.raises(ValueError, match="the last is not depthscope's"):
        commands_in("```bash\ndepthscope demo\nls\n```\n```text\na\n```\n")


def test_the_parser_refuses_what_does_not_exist():
    for arguments in (("prob", "bert"), ("probe", "bert", "--dept", "3"), ("probe", "bert", "--depth", "x"), ("fix",)):
        with pytest.raises((AssertionError, typer.BadParameter.__base__)):
            parse(arguments)
