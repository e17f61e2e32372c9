"""Settings by name: read by their type, written as they are read, refused in one line."""

import pytest

from depthscope_lab.training.config import ImageConfig, LanguageConfig, field_help, field_types
from depthscope_lab.training.recipes import RECIPES
from depthscope_lab.training.run import Run
from depthscope_lab.training.settings import read_settings, read_value, written

TYPES = field_types(ImageConfig) | field_types(Run)


def test_values_are_read_by_the_type_of_their_field():
    given = ["lr=1", "steps=3", "drop_at=0.5, 0.75", "augment=yes", "clip-norm=none", "tracker=none", "lr=2e-3"]
    assert read_settings(given, TYPES) == {
        "lr": 2e-3,
        "steps": 3,
        "drop_at": (0.5, 0.75),
        "augment": True,
        "clip_norm": None,
        "tracker": "none",
    }


@pytest.mark.parametrize("name", RECIPES)
def test_every_setting_is_written_as_it_is_read(name: str):
    config = RECIPES[name]("post")
    kinds = field_types(type(config))
    for setting in field_help(type(config)):
        value = getattr(config, setting)
        assert read_value(setting, written(value), kinds[setting]) == value


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("lr", "expected --set name=value, got 'lr'"),
        ("dept=3", "unknown setting 'dept': did you mean 'depth'"),
        ("depth=three", "expected depth to be a whole number, got 'three'"),
        ("depth=2.5", "expected depth to be a whole number, got '2.5'"),
        ("lr=fast", "expected lr to be a number, got 'fast'"),
        ("augment=perhaps", "expected augment to be true or false, got 'perhaps'"),
        ("drop_at=half", "expected drop_at to be numbers separated by commas, got 'half'"),
        ("depth=none", "expected depth to be a whole number, got 'none'"),
    ],
)
def test_a_mistake_is_one_line(given: str, message: str):
    with pytest.raises(ValueError, match=message):
        read_settings([given], TYPES)


def test_every_setting_has_a_help_text():
    for kind in (ImageConfig, LanguageConfig, Run):
        assert all(text.endswith(".") for text in field_help(kind).values())
