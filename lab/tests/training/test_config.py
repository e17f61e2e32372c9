"""Configurations: the paper's settings, changes by name, differences."""

import json
import subprocess
import sys

import pytest

from depthscope.remedies.record import from_dict
from depthscope_lab.training.config import ImageConfig, as_now, differences, field_help
from depthscope_lab.training.recipes import RECIPES, txl_manual, vit_cifar10, vit_digits
from depthscope_lab.training.task import recorded, remedies_of
from depthscope_lab.training.variants import VARIANTS, YU_ZHANG
from tiny_training import tiny_config


@pytest.mark.parametrize("variant", YU_ZHANG)
def test_vit_cifar10_is_table_1_and_section_3_3(variant):
    config = vit_cifar10(variant)
    assert (config.depth, config.width, config.ffn_width, config.heads) == (80, 192, 384, 8)
    assert config.width // config.heads == 24
    assert (config.patch_size, config.batch_size, config.epochs) == (4, 128, 150)
    assert (config.beta1, config.beta2, config.weight_decay) == (0.9, 0.999, 0.1)
    assert (config.schedule, config.drop_factor, config.drop_at) == ("drops", 1 / 5, (0.7, 0.9))
    assert config.lr == (0.5e-4 if variant == "post" else 1e-4)
    assert config.augment
    assert (config.warmup_steps, config.clip_norm) == (0, None)


@pytest.mark.parametrize(
    ("name", "variant"),
    [(name, variant) for name, recipe in RECIPES.items() for variant in VARIANTS if variant not in recipe.without],
)
def test_every_recipe_names_itself_and_is_plain_json(name, variant):
    config = RECIPES[name](variant)
    assert (config.recipe, config.variant) == (name, variant)
    assert isinstance(config, RECIPES[name].config)
    assert json.loads(json.dumps(config.as_json())) == config.as_json()


def test_every_field_but_the_names_can_be_changed():
    settings = field_help(ImageConfig)
    assert set(vit_digits("pre").as_json()) - set(settings) == {
        "recipe",
        "variant",
        "wiring",
        "remedies",
        "initialiser",
        "dataset",
    }
    changed = vit_digits("pre").changed(depth=3, lr=1, drop_at=(0.5,))
    assert (changed.depth, changed.lr, changed.drop_at) == (3, 1, (0.5,))
    assert vit_digits("pre").depth == 48


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dept": 3}, "did you mean 'depth'"),
        ({"learning": 1e-3}, "expected some of final_norm, depth, width"),
        ({"recipe": "mine"}, "no setting 'recipe'"),
        ({"depth": 0}, "expected depth greater than 0, got 0"),
        ({"depth": 2.5}, "expected depth to be int, got 2.5"),
        ({"depth": True}, "expected depth to be int, got True"),
        ({"steps": "many"}, "expected steps to be int or NoneType, got 'many'"),
        ({"lr": float("nan")}, "expected lr to be finite, got nan"),
        ({"beta1": 1.0}, "not including, 1"),
        ({"precision": "float23"}, "did you mean 'float32'"),
        ({"wiring": "pre"}, "no setting 'wiring'"),
        ({"seed": -1}, "at least 0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)


def test_differences_name_the_fields():
    before, now = tiny_config().as_json(), tiny_config(lr=0.5, depth=3).as_json()
    assert differences(before, before) == []
    assert differences(before, now) == ["depth: 2 → 3", "lr: 0.001 → 0.5"]
    assert differences({}, {"new": 1}) == ["new: None → 1"]


def test_recipes_are_read_without_torch():
    modules = ("recipes", "run", "variants", "settings", "comparison")
    imports = "; ".join(f"import depthscope_lab.training.{module}" for module in modules)
    code = f"import sys; {imports}; assert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_configuration_says_by_itself_what_its_variant_is_made_of():
    config = vit_digits("deescalated(tau=0.5)+residual-weight(alpha=0.25)@xavier")
    found = config.as_json()
    assert (found["wiring"], found["initialiser"], found["final_norm"]) == ("post", "xavier", None)
    assert found["remedies"] == [
        {"remedy": "de-escalation", "tau": 0.5, "at": "output"},
        {"remedy": "residual-weight", "alpha": 0.25},
    ]
    assert vit_digits("post").as_json()["remedies"] == []
    full = recorded(config)
    assert full["remedies"][0]["mixing"] == "auto"  # what nobody gave
    assert [from_dict(record) for record in full["remedies"]] == remedies_of(config)
    assert json.loads(json.dumps(full)) == full


def test_what_was_recorded_before_a_setting_was_there_had_its_default():
    for config in (vit_digits("post"), txl_manual("post")):
        before = config.as_json()
        del before["evaluate_on"]
        assert differences(before, config.as_json()) != []
        assert differences(as_now(before, config), config.as_json()) == []
        assert differences(as_now(before | {"at_once": False}, config), config.as_json()) == []
        assert differences(as_now(before | {"at_once": True}, config), config.as_json()) == ["at_once: True → None"]
