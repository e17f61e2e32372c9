"""`depthscope tour`: the whole story in a few minutes. Every chapter is a command that a reader can type again."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from depthscope.cli.command import ending_in_order
from depthscope.cli.values import folder
from depthscope.exit_codes import Terminated


def chapters(quick: bool) -> Iterator[tuple[str, str, str, str]]:
    """Title, what it is about, the command, and the folder that it keeps, if any; `quick`: small enough for a test."""
    from depthscope_lab.papers.subjects import minilm

    size = "--depth 4 --tokens 16 --width 64" if quick else "--depth 100 --tokens 64"
    yield (
        "Do tokens grow alike with depth?",
        "Three models with random weights read the same 64 tokens. In the classic form (post-norm) all tokens become "
        "equal; de-escalated, with the tokens' mean subtracted after every block, it keeps them different.",
        f"demo --depth {12 if quick else 60}",
        "",
    )
    yield (
        f"BERT with {4 if quick else 100} blocks: does it collapse, and can its attention learn?",
        "The verdict says when, which step is to blame, and in how many blocks attention can learn: where tokens are "
        "alike, the gradient of queries and keys vanishes, while that of values and output stays.",
        f"probe bert {size} --samples 2 --gradients --estimate",
        "bert",
    )
    yield (
        "The same BERT, de-escalated",
        "De-escalation subtracts a part τ of the tokens' mean after every block, here one half. All else is as it was.",
        f"fix bert {size} --samples 2 --tau 0.5 --alpha 1",
        "bert-fixed",
    )
    yield (
        "Does it train? Three Vision Transformers on handwritten digits",
        "Post-norm, pre-norm and de-escalated, the same data and steps: one run each, at the recipe's learning rates, "
        "which are not tuned. It shows how a comparison is made; what holds over seeds is in docs/studies.",
        "compare vit-digits --variants post,pre,deescalated --seeds 1 --jobs 2 "
        + ("--depths 2 --steps 4 --width 16" if quick else "--depths 24 --steps 110"),
        "digits",
    )
    for trained in minilm():
        yield (
            "A real model: MiniLM, a pretrained BERT of 6 blocks",
            "What random weights do is not what trained weights do: read its verdict beside that of the fresh BERT.",
            f"probe {shlex.quote(f'hf:{trained.folder}')} --samples {2 if quick else 8}",
            "minilm",
        )


@ending_in_order()
def tour(
    out: Annotated[
        Path, typer.Option(parser=folder, metavar="DIR", help="Where results and the report are kept.")
    ] = Path("depthscope-tour"),
    quick: Annotated[bool, typer.Option("--quick", help="Tiny models: seconds, and less to see.")] = False,
) -> None:
    """See the whole story in a few minutes: a collapse, its cause, its repair, training, and a real model."""
    from depthscope.cli.command import require_writable
    from depthscope.cli.console import Screen

    require_writable(out)
    console, kept, failed = Screen(), [], []
    story, began = list(chapters(quick)), time.monotonic()
    for number, (chapter, about, command, keeps) in enumerate(story, 1):
        title = f"{number} of {len(story)}: {chapter}"
        console.print()
        console.say(title, styles={title: "bold"})
        console.say(about)
        place = ["--out", str(out / keeps)] if keeps else []
        if _run([*shlex.split(command), *place]) != 0:
            failed.append(chapter)
        elif keeps:
            kept.append(str(out / keeps))
    console.print(f"\nThe tour took {time.monotonic() - began:.0f} s.")
    if failed:
        console.say(f"Failed: {'; '.join(failed)}.")
    if kept and find_spec("altair") is None:
        console.say("Without a page: that needs altair (pip install 'depthscope[report]').")
    elif kept and _run(["report", *kept, "--out", str(out), "--title", "A tour of depth"]) != 0:
        failed.append("the page")
    if failed:
        raise typer.Exit(1)


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
                process.kill()  # at a second signal we do not wait
            raise
