"""What the shell completes, by the protocol that the shells use, and how fast."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from depthscope.cli import completion
from depthscope.models.families import FAMILIES
from depthscope_lab.cli import settings as of_the_lab
from depthscope_lab.papers import STUDIES
from depthscope_lab.training.recipes import RECIPES
from depthscope_lab.training.variants import VARIANTS

WATCHED = (
    "import sys\n"
    "from depthscope.cli import main\n"
    "try: main()\n"
    "finally:\n"
    "    heavy = {'torch', 'numpy', 'pandas', 'pyarrow', 'transformers', 'matplotlib'} & sys.modules.keys()\n"
    "    assert not heavy, heavy"
)


def completed(line: str) -> list[str]:
    """What bash is offered for the last word of a line; nothing heavy is imported for it."""
    words = line.split(" ")
    hints = {"_DEPTHSCOPE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    result = subprocess.run(
        [sys.executable, "-c", WATCHED], env=os.environ | hints, capture_output=True, text=True, check=False
    )
    assert result.stderr == ""
    return result.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("depthscope re", {"report", "reproduce"}),
        ("depthscope probe gemma", {"gemma", "gemma2", "gemma3"}),
        ("depthscope fix enc", {"encoder"}),
        ("depthscope reproduce yu2024-fig1 dong", {name for name in STUDIES.ours() if name.startswith("dong")}),
        ("depthscope reproduce al", {"all"}),
        ("depthscope train vit", {"vit-digits", "vit-cifar10"}),
        ("depthscope train vit-digits --variant p", {name for name in VARIANTS.ours() if name.startswith("p")}),
        ("depthscope compare vit-digits --variants post,pr", {"post,pre", "post,pre-final-norm"}),
        ("depthscope schema pa", {"paths"}),
        ("depthscope probe bert --dtype fl", {"float32", "float64", "float16"}),
    ],
)
def test_a_word_is_completed(line: str, offered: set[str]):
    assert set(completed(line)) == offered


def test_every_name_is_offered():
    """The families by a list of its own, since their file imports torch."""
    assert FAMILIES.ours() == completion.FAMILIES
    assert of_the_lab.complete_recipe("") == RECIPES.ours()
    assert of_the_lab.complete_variant("") == VARIANTS.ours()


def test_a_folder_that_is_called_nearly_so_is_named_and_a_name_on_the_hub_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "google" / "bert-cased").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"did you mean 'hf:.*/bert-cased'"):
        completion.refuse_a_typo(f"hf:{tmp_path}/google/bert-case")
    monkeypatch.chdir(tmp_path)
    completion.refuse_a_typo("hf:google/bert-uncased")
    assert completion.near_folder("google/bert-uncased") == "did you mean 'hf:google/bert-cased'? "


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell(shell: str):
    hints = {"_DEPTHSCOPE_COMPLETE": f"source_{shell}"}
    result = subprocess.run(
        [sys.executable, "-c", WATCHED], env=os.environ | hints, capture_output=True, text=True, check=False
    )
    assert "_DEPTHSCOPE_COMPLETE" in result.stdout


def test_help_takes_less_than_half_a_second():
    """Of the processor, the best of three: how busy the machine is does not count."""

    def spent() -> float:
        before = os.times()
        subprocess.run([sys.executable, "-m", "depthscope", "--help"], check=True, capture_output=True)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(spent() for _ in range(3)) < 0.5
