"""Another package's recipe, variant, wiring and buildable family, found by their entry points, on the command line."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from processes import train_here
from warm import run_warm

CODE = '''
from dataclasses import replace

from depthscope_lab.training import Recipe, Variant, vit_digits


def small_digits(variant):
    tiny = {"depth": 2, "width": 8, "heads": 2, "ffn_width": 8, "steps": 2}
    return replace(vit_digits(variant), recipe="small-digits", **tiny)


class Numbers:
    """A task of its own: a model that learns to repeat a number."""

    unit, units_per_step, steps_per_epoch = "numbers", 4, 2

    def __init__(self, config):
        self.config = config

    def build(self):
        from depthscope.models import BlockConfig, Encoder

        return Encoder(self.config.depth, BlockConfig(self.config.width, 1, placement=self.config.wiring))

    def batch(self, step, share, device):
        import torch

        return torch.full((4, 3, self.config.width), float(step + 1), device=device)

    def loss(self, model, batch, carry):
        return (model(batch) - batch).square().mean(), None

    def evaluate(self, model, share, device):
        loss = self.loss(model, self.batch(0, share, device), None)[0].item()
        return {"test_loss": loss, "digits_right": 0.25, "score_std": 3.0, "count": 1.0}

    def report(self, means):
        return means

    def describe(self):
        return {"name": "numbers"}


SMALL = Recipe("small-digits", small_digits, type(vit_digits("post")), "a small ViT", "seconds")
NUMBERS = Recipe(
    "numbers",
    lambda variant: replace(small_digits(variant), recipe="numbers"),
    type(vit_digits("post")),
    "numbers",
    "seconds",
    task=lambda config, data: Numbers(config),
)
RECIPES = [SMALL, NUMBERS]
VARIANT = Variant("backwards", "post-norm, in reverse", "backwards")


def backwards(block, x, given):
    from depthscope.models.wiring import run_post_norm

    return run_post_norm(block, x.flip(-2), given).flip(-2)


def __getattr__(name):
    if name == "WIRING":
        from depthscope.models import Wiring

        return Wiring("backwards", backwards, final_norm=False, placement="post")
    if name == "FAMILY":
        from depthscope.models.families import EncoderFamily, Shape

        return EncoderFamily("narrow-encoder", Shape(2, 16, 2, 32))
    raise AttributeError(name)
'''
POINTS = """[depthscope.recipes]
all = other_package:RECIPES
[depthscope.variants]
backwards = other_package:VARIANT
[depthscope.wirings]
backwards = other_package:WIRING
[depthscope.models]
narrow = other_package:FAMILY
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that has the other package."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "other_package.py").write_text(CODE)
    information = folder / "other_package-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: other-package\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(POINTS)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def depthscope(installed: dict[str, str], *arguments: str, first: Callable[[], object] | None = None) -> str:
    result = run_warm("-m", "depthscope", *arguments, env=installed, first=first)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_recipes_and_variants_of_others_are_listed(installed):
    out = depthscope(installed, "train")
    assert "small-digits" in out
    assert "post-norm, in reverse" in out


def test_they_are_trained_and_compared(installed, tmp_path: Path):
    run = str(tmp_path / "run")
    out = depthscope(installed, "train", "small-digits", "--variant", "backwards", "--cpu", "--out", run)
    assert out.startswith("done: 2 steps")
    config = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert (config["wiring"], config["lr"]) == ("backwards", 0.5e-4)  # the least of the recipe
    arguments = ("small-digits", "--variants", "backwards,post", "--seeds", "1", "--jobs", "2", "--cpu", "--json")
    summary = json.loads(depthscope(installed, "compare", *arguments, "--out", str(tmp_path / "compared")))
    assert [row["variant"] for row in summary["cells"]] == ["backwards", "post"]


def test_a_recipe_may_bring_its_task(installed, tmp_path: Path):
    run = ("--variant", "post", "--cpu", "--out", str(tmp_path / "run"))
    assert "steps       2 (2 per epoch)" in depthscope(installed, "train", "numbers", *run, "--dry-run")
    assert depthscope(installed, "train", "numbers", *run).startswith("done: 2 steps, test loss")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["data"] == {"name": "numbers"}


def test_whatever_a_task_reports_is_compared(installed, tmp_path: Path):
    arguments = ("numbers", "--variants", "post,pre", "--seeds", "1", "--cpu", "--out", str(tmp_path))
    out = depthscope(installed, "compare", *arguments, first=train_here)
    assert out.splitlines()[0].split("runs")[1].split() == ["loss", "test", "loss", "digits", "right", "score", "std"]
    assert out.splitlines()[1].split()[-2:] == ["0.250", "3.000"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [row["digits_right"] for row in summary["cells"]] == [0.25, 0.25]
    frame = pd.read_parquet(tmp_path / "curves.parquet")
    assert {"digits_right", "test_loss", "score_std"} <= set(frame["quantity"])
    assert not {"lr", "epoch", "numbers_per_second", "step"} & set(frame["quantity"])


def test_a_family_of_others_is_probed_by_its_name(installed):
    out = depthscope(installed, "probe", "narrow-encoder", "--json")
    assert json.loads(out)
