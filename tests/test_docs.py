"""The docs stay true: every block of code runs and prints what the page says, every command has its options."""

import tomllib
import warnings
from pathlib import Path

import pytest
import typer

from pages import PAGES, ROOT, Unclear, commands_in_the_text, parse, pieces_of, program, try_page

NAMED = {path.relative_to(ROOT).as_posix(): path for path in PAGES}
REFUSALS = (AssertionError, NameError, SyntaxError, Unclear, tomllib.TOMLDecodeError, typer.BadParameter.__base__)
HISTORY = {"CHANGELOG.md", "docs/log.md"}  # what a command was called then
RUN = [name for name, path in NAMED.items() if name != "README.md" and "\n```" in path.read_text()]


@pytest.mark.parametrize("page", RUN)
def test_a_page_does_what_it_says(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # as for a reader: a warning is no error
        try_page(pieces_of(NAMED[page].read_text(), page), program(monkeypatch, capsys))


@pytest.mark.parametrize("page", sorted(NAMED.keys() - HISTORY))
def test_commands_in_the_text_exist_with_their_options(page: str):
    for arguments in commands_in_the_text(NAMED[page].read_text()):
        given = tuple(word for word in arguments if word not in ("--help", "--help-all"))
        parse(given if len(given) > 1 or given == ("agents",) else (*given, "MODEL"))  # alone: the name of a command


def test_there_is_something_to_try():
    assert {"docs/probing.md", "docs/remedies.md", "docs/training.md", "docs/studies/README.md"} <= set(RUN)
    assert sum(len(commands_in_the_text(path.read_text())) for path in NAMED.values()) > 50


# --- the walk itself, with mutants -----------------------------------------------------------------


def calls(page: str) -> list[tuple[str, ...]]:
    """The commands of a made-up page that are run; each prints its own words."""
    made: list[tuple[str, ...]] = []

    def run(arguments: tuple[str, ...]) -> str:
        made.append(arguments)
        return " ".join(arguments)

    try_page(pieces_of(page, "x.md"), run)
    return made


def test_blocks_run_in_order_in_one_namespace():
    page = """
<!-- given
a = 1
-->
```python
b = a + 1
```
```python
print(a + b)
```
words
```text
3
```
```bash
depthscope probe encoder --depth 2   # a comment
depthscope probe hf:folder
torchrun --nproc-per-node 4 -m depthscope train vit-digits
make demo
pip install '.[figures]' ./lab
```
<!-- parsed only: takes an hour -->
```bash
depthscope probe encoder --depth 3
```
```toml
a = 1
```
```
└── a picture in letters
```
"""
    assert calls(page) == [("probe", "encoder", "--depth", "2")]


@pytest.mark.parametrize(
    "page",
    [
        "```python\nprint(1)\n```\n```text\n2\n```\n",  # what is shown is not printed
        "```bash\ndepthscope probe encoder\n```\n```text\nprobe decoder\n```\n",
        "```python\n1 +\n```\n",
        "```python\nb\n```\n",  # not given
        "<!-- parsed only: no time -->\n```python\n1 +\n```\n",
        "<!-- parsed only: no time -->\n```bash\ndepthscope probe encoder --dept 2\n```\n",
        "<!-- parsed only: no time -->\n```bash\ndepthscope prob encoder\n```\n",
        "<!-- parsed only: -->\n```bash\ndepthscope probe encoder\n```\n",  # without a reason
        "<!-- skipped: no time -->\n```python\n1\n```\n",
        "<!-- parsed only: no time -->\nwords\n```python\n1\n```\n",  # not right before a block
        "```python\n1\n```\n<!-- parsed only: no time -->\n",
        "<!-- parsed only: no time -->\n```bash\ndepthscope probe encoder\n```\n```text\nprobe encoder\n```\n",
        "```bash\ndepthscope probe hf:folder\n```\n```text\nprobe hf:folder\n```\n",  # shown, and only parsed
        "```text\nout of nothing\n```\n",
        "```console\n$ depthscope probe encoder\n```\n",
        "```py\n1\n```\n",
        "```bash\ncurl something\n```\n",
        "```bash\nmake nothing\n```\n",
        "```bash\npip install '.[nothing]'\n```\n",
        "```bash\npython examples/nothing.py\n```\n",
        "```toml\na =\n```\n",
        "```\ndepthscope probe encoder\n```\n",  # code without a language
        "```\nimport depthscope\n```\n",
        "```python\n1\n",  # never closed
        "- in a list\n\n  ```python\n  1\n  ```\n",
    ],
)
def test_what_is_wrong_or_would_be_skipped_is_refused(page: str):
    with pytest.raises(REFUSALS):
        calls(page)


def test_a_block_that_nothing_tries_is_named():
    with pytest.raises(Unclear, match=r"x.md:3: there is no way to try 'rust'"):
        calls("# x\n\n```rust\nfn\n```\n")
