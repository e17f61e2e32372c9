"""`depthscope tour`: the whole story in a few minutes. Every chapter is a command that a reader can type again."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from depthscope.cli.running import ending_in_order
from depthscope.cli.values import folder
from depthscope.exit_codes import Terminated

EXTRAS = {"transformers": "huggingface", "altair": "report", "matplotlib": "figures"}
CUT_SHORT = 1  # how the tour ends if a chapter failed


@dataclass(frozen=True)
class Chapter:
    """One command, and what it is to show. `needs`: modules without which it is left out."""

    title: str
    about: str
    command: tuple[str, ...]
    keeps: str = ""  # the folder, in that of the tour, where its results are
    needs: tuple[str, ...] = ()


def chapters(quick: bool) -> Iterator[Chapter]:
    """The story, in order; `quick`: with models that are small enough for a test."""
    from depthscope_lab.papers.subjects import minilm

    bert: tuple[str, ...] = (
        "bert",
        "--depth",
        "4" if quick else "100",
        "--tokens",
        "16" if quick else "64",
        "--samples",
        "2",
    )
    bert = (*bert, "--width", "64") if quick else bert
    blocks = bert[2]
    yield Chapter(
        "Do tokens grow alike with depth?",
        "Three models with random weights read the same 64 tokens. In the classic form (post-norm) all tokens become "
        "equal; de-escalated, with the tokens' mean subtracted after every block, it keeps them different.",
        ("demo", "--depth", "12" if quick else "60"),
    )
    yield Chapter(
        f"BERT with {blocks} blocks: does it collapse, and can its attention learn?",
        "The verdict says when, which step is to blame, and in how many blocks attention can learn: where tokens are "
        "alike, the gradient of queries and keys vanishes, while that of values and output stays.",
        ("probe", *bert, "--gradients", "--estimate"),
        keeps="bert",
        needs=("transformers",),
    )
    yield Chapter(
        "The same BERT, de-escalated",
        "De-escalation subtracts a part τ of the tokens' mean after every block, here one half. All else is as it was.",
        ("fix", *bert, "--tau", "0.5", "--alpha", "1"),
        keeps="bert-fixed",
        needs=("transformers",),
    )
    yield Chapter(
        "Does it train? Three Vision Transformers on handwritten digits",
        "Post-norm, pre-norm and de-escalated, the same data and steps: one run each, at the recipe's learning rates, "
        "which are not tuned. It shows how a comparison is made; what holds over seeds is in docs/studies.",
        (
            *("compare", "vit-digits", "--variants", "post,pre,deescalated", "--seeds", "1", "--jobs", "2"),
            *("--depths", "2" if quick else "24", "--steps", "4" if quick else "110"),
            *(("--width", "16") if quick else ()),
        ),
        keeps="digits",
        needs=("sklearn", "accelerate", "matplotlib"),
    )
    for trained in minilm():
        yield Chapter(
            "A real model: MiniLM, a pretrained BERT of 6 blocks",
            "What random weights do is not what trained weights do: read its verdict beside that of the fresh BERT.",
            ("probe", f"hf:{trained.folder}", "--samples", "2" if quick else "8"),
            keeps="minilm",
            needs=("transformers",),
        )


@ending_in_order()
def tour(
    out: Annotated[
        Path, typer.Option(parser=folder, metavar="DIR", help="Where results and the report are kept.")
    ] = Path("depthscope-tour"),
    quick: Annotated[bool, typer.Option("--quick", help="Tiny models: seconds, and less to see.")] = False,
) -> None:
    """See the whole story in a few minutes: a collapse, its cause, its repair, training, and a real model."""
    from depthscope.cli.console import Screen
    from depthscope.cli.running import require_writable

    require_writable(out)
    console, kept, failed = Screen(), [], []
    story = list(chapters(quick))
    began = time.monotonic()
    for number, chapter in enumerate(story, 1):
        console.print(f"\n[bold]{number} of {len(story)}: {chapter.title}[/bold]", markup=True)
        console.say(chapter.about)
        if absent := [name for name in chapter.needs if find_spec(name) is None]:
            how = f"'depthscope[{EXTRAS[absent[0]]}]'" if absent[0] in EXTRAS else "./lab, in a checkout"
            console.say(f"Left out: it needs {absent[0]} (pip install {how}).")
            continue
        place = ["--out", str(out / chapter.keeps)] if chapter.keeps else []
        if _run([*chapter.command, *place]) != 0:
            failed.append(chapter.title)
        elif chapter.keeps:
            kept.append(out / chapter.keeps)
    console.print(f"\nThe tour took {time.monotonic() - began:.0f} s.")
    if failed:
        console.say(f"Failed: {'; '.join(failed)}.")
    if kept and find_spec("altair") is None:
        console.say("Without a page: that needs altair (pip install 'depthscope[report]').")
    elif kept and _run(["report", *map(str, kept), "--out", str(out), "--title", "A tour of depth"]) != 0:
        failed.append("the page")
    if failed:
        raise typer.Exit(CUT_SHORT)


def _run(arguments: list[str]) -> int:
    """A command of ours in a process of its own, which gives its memory back; it prints to where we print.

    A signal reaches it through us, once, and we wait until it has shown and saved what it has finished.
    """
    print(f"$ depthscope {shlex.join(arguments)}", flush=True)
    with subprocess.Popen([sys.executable, "-m", "depthscope", *arguments], start_new_session=True) as process:
        try:
            return process.wait()
        except KeyboardInterrupt as interrupt:
            process.send_signal(signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT)
            try:
                process.wait()
            finally:
                process.kill()  # told twice, we do not wait
            raise
