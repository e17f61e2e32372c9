"""The pages of the docs: their code blocks in order, what is said of them, and how each is tried.

Every fenced block has a language that is known here, and every language a way to be tried:

- ```python is run, all blocks of a page in one namespace; ```bash is run line by line;
- ```text is what the block before it prints, and is compared;
- ```toml is read; a block without a language is a picture in letters, and may hold neither commands nor Python.

Two comments, which no reader sees, are for the tests:

- `<!-- given` and lines of Python until `-->`: run where they stand, such as the model that a page calls yours;
- `<!-- parsed only: the reason -->` right before a block: Python is compiled, commands are parsed with all options.
"""

import ast
import contextlib
import io
import re
import shlex
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import typer

from depthscope.cli.app import app, main
from readme import difference

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
_PIECE = re.compile(
    r"^```(?P<language>[^\n]*)\n(?P<code>.*?)^```$|^<!--(?P<comment>.*?)-->", flags=re.MULTILINE | re.DOTALL
)
_FENCED = re.compile(r"^```.*?^```$", flags=re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(depthscope [a-z][^`\n]*(?:\n[^`\n]+)?)`")

# Commands that match are parsed and not run, wherever they stand, for the reason given.
PARSED_ONLY = {
    r"hf:": "the model is the reader's",
    r"\w+\.\w+:\w+": "the code is the reader's",
    r"\bpath/": "the files are the reader's",
    r"--data\b": "the data are the reader's",
    r"^depthscope probe \w+ --depth [1-9]\d\d": "half a minute; tests/diagnosis has a narrow model of that depth",
    r"^depthscope train \S+(?!.*--dry-run)": "minutes; lab/tests/cli/test_train.py trains a smaller one",
    r"^depthscope compare (?!.*--dry-run)": "an hour; lab/tests/cli/test_compare.py compares smaller ones",
    r"^depthscope reproduce [\w-]+(?!.*--quick)": "the full form; every quick form is computed in lab/tests/papers",
    r"^depthscope reproduce all": "every quick form is computed in lab/tests/papers",
}


@dataclass(frozen=True)
class Piece:
    """A fenced block, or lines of Python that are given: where it stands, what it is, and what it is to print."""

    page: str
    line: int
    language: str
    code: str
    shown: str | None = None
    parsed_only: str | None = None  # the reason

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


class Unclear(ValueError):
    """A page has something that would be neither run nor refused."""


def pieces_of(text: str, page: str) -> list[Piece]:
    found: list[Piece] = []
    reason: str | None = None
    end = 0
    for match in _PIECE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        here = f"{page}:{line}"
        if reason is not None and text[end : match.start()].strip():
            raise Unclear(f"{here}: a comment on how to try a block stands right before it")
        end = match.end()
        if match["language"] is None:
            reason = None if (comment := match["comment"].strip()).startswith("given") else _reason(comment, here)
            if comment.startswith("given"):
                found.append(Piece(page, line, "given", comment.removeprefix("given")))
            continue
        language, code = match["language"].strip(), match["code"]
        if language == "text":
            if not found or found[-1].language not in ("python", "bash") or found[-1].shown is not None:
                raise Unclear(f"{here}: a ```text block shows what the ```python or ```bash block before it prints")
            if found[-1].parsed_only or reason:
                raise Unclear(f"{here}: what is shown is run")
            before = found.pop()
            found.append(Piece(page, before.line, before.language, before.code, code))
        else:
            found.append(Piece(page, line, language, code, None, reason))
        reason = None
    if reason is not None:
        raise Unclear(f"{page}: ends with a comment on how to try a block")
    if len(re.findall(r"^[ \t>]*(?:```|~~~)", text, re.MULTILINE)) != 2 * len(_FENCED.findall(text)):
        raise Unclear(f"{page}: a fence is indented, or not closed, or not ```")
    return found


def _reason(comment: str, here: str) -> str:
    kind, _, reason = comment.partition(":")
    if kind != "parsed only" or not reason.strip():
        raise Unclear(f"{here}: expected 'given' or 'parsed only: the reason', got {comment[:40]!r}")
    return reason.strip()


def try_page(pieces: list[Piece], run: Callable[[tuple[str, ...]], str]) -> None:
    """Runs a page from top to bottom. `run` calls the program with arguments, and returns what it printed."""
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    for piece in pieces:
        printed: str | None
        if piece.language in ("python", "given"):
            printed = _run_python(piece, namespace)
        elif piece.language == "bash":
            printed = _run_commands(piece, run)
        elif piece.language == "toml":
            printed = str(tomllib.loads(piece.code))
        elif piece.language == "":
            _refuse_code(piece)
            continue
        else:
            raise Unclear(f"{piece}: there is no way to try {piece.language!r}: write python, bash, text or toml")
        if piece.shown is not None:
            found = "nothing was run" if printed is None else difference(piece.shown, printed)
            assert found is None, f"{piece}: {found}"


def _run_python(piece: Piece, namespace: dict[str, Any]) -> str | None:
    code = compile(ast.parse("\n" * piece.line + piece.code, piece.page), piece.page, "exec")
    if piece.parsed_only:
        return None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, namespace)
    return printed.getvalue()


def _run_commands(piece: Piece, run: Callable[[tuple[str, ...]], str]) -> str | None:
    """What the last command printed; None if it was only parsed."""
    printed = None
    lines = piece.code.replace("\\\n", " ").splitlines()
    commands = [up_to_a_pipe(shlex.split(line, comments=True)) for line in lines]
    for words in filter(None, commands):
        arguments = arguments_of(words, str(piece))
        printed = None
        if arguments is not None:
            parse(arguments)
            if not piece.parsed_only and words[0] == "depthscope" and reason_to_parse_only(arguments) is None:
                printed = run(arguments)
    return printed


def up_to_a_pipe(words: list[str]) -> list[str]:
    """What the shell gives to the first program: not what its output goes into."""
    return list(takewhile(lambda word: word not in ("|", ">"), words))


def arguments_of(words: list[str], where: str) -> tuple[str, ...] | None:
    """What a command line gives to depthscope; None of another program's, of which is checked what it names."""
    match words:
        case ["depthscope", *arguments]:
            return tuple(arguments)
        case ["torchrun", *_] if "-m" in words and words[(at := words.index("-m")) + 1] == "depthscope":
            return tuple(words[at + 2 :])
        case ["make", target, *_]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE), f"{where}: {target}"
        case ["pip", "install", *options]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            named = {name for option in options for part in re.findall(r"\[(.*)\]", option) for name in part.split(",")}
            assert named <= extras.keys(), f"{where}: {named - extras.keys()}"
        case ["python", script, *_]:
            assert (ROOT / script).is_file(), f"{where}: {script}"
        case _:
            raise Unclear(f"{where}: there is no way to try {shlex.join(words)!r}")
    return None


def reason_to_parse_only(arguments: tuple[str, ...]) -> str | None:
    command = shlex.join(("depthscope", *arguments))
    return next((reason for pattern, reason in PARSED_ONLY.items() if re.search(pattern, command)), None)


def parse(arguments: tuple[str, ...]) -> str:
    """Parses a command as the program does, without calling it; an unknown command, option or value is an error."""
    group = typer.main.get_command(app)
    command = group.get_command(typer.Context(group), arguments[0])
    assert command is not None, f"there is no command {arguments[0]!r}"
    return command.make_context(f"depthscope {arguments[0]}", list(arguments[1:])).command.name


def _refuse_code(piece: Piece) -> None:
    for line in piece.code.splitlines():
        if re.match(r"\s*(\$|depthscope\b(?!-)|make |pip |python |import |from \w+ import)", line):
            raise Unclear(f"{piece}: a block without a language has code: {line.strip()!r}")


def commands_in_the_text(text: str) -> list[tuple[str, ...]]:
    """Commands that stand between backticks in a sentence or a table."""
    return [tuple(up_to_a_pipe(shlex.split(found))[1:]) for found in _INLINE.findall(_FENCED.sub("", text))]


def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[tuple[str, ...]], str]:
    """Calls the program in this process, on a terminal of 80 columns; returns what it printed."""

    def run(arguments: tuple[str, ...]) -> str:
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setattr(sys, "argv", ["depthscope", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            main()
        printed = capsys.readouterr()
        assert exit.value.code == 0, f"{shlex.join(arguments)}: {printed.err}"
        assert printed.out.strip()
        return printed.out

    return run
