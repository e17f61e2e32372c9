"""Variants: the table, what is composed on the spot, the notation, and learning rates for what no recipe names."""

import pytest
import torch

from depthscope.models import INITIALISERS, WIRINGS, Wiring
from depthscope.models.wiring import run_pre_norm
from depthscope.remedies import REMEDIES, DeEscalate, Ema, LearnableTau, ResidualWeight, applied
from depthscope.remedies.record import from_dict
from depthscope.report.formats import folder_name
from depthscope_lab.models import PUBLISHED
from depthscope_lab.training.estimate import estimate
from depthscope_lab.training.images import build_vit
from depthscope_lab.training.loading import make_task
from depthscope_lab.training.notation import Named, parse, split
from depthscope_lab.training.recipes import vit_digits
from depthscope_lab.training.variants import VARIANTS, Variant, label_of, learning_rate_for, variant_of
from tiny_language import small, task_of
from tiny_training import tiny_config


def remedy_of(named: Named):
    return from_dict(named.record("remedy"))


RATES = {"post": 1.0, "pre": 2.0, "deescalated": 3.0}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_table_names_what_exists(name: str):
    variant = VARIANTS[name]
    assert variant.wiring in WIRINGS
    assert variant.initialiser is None or variant.initialiser in INITIALISERS
    for remedy in variant.remedies:
        remedy_of(remedy)
    assert variant_of(name) is variant


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("de-escalation", DeEscalate()),
        ("de-escalation(tau=0.5,at=ffn_input)", DeEscalate(0.5, "ffn_input")),
        ("de-escalation( mixing = Ema(decay=0.9, shrink=1) )", DeEscalate(mixing=Ema(0.9, shrink=1))),
        ("de-escalation(tau=LearnableTau(start=0.3, per_feature=true))", DeEscalate(LearnableTau(0.3, True))),
        ("de-escalation(blocks=[1, 2], allow_leak=False)", DeEscalate(blocks=(1, 2))),
        ("de-escalation(blocks=none, every=2)", DeEscalate(every=2)),
        ("residual-weight(alpha=1e-1)", ResidualWeight(0.1)),
    ],
)
def test_a_remedy_is_written_as_it_is_read(text: str, remedy: object):
    assert remedy_of(parse(text)) == remedy
    assert parse(str(parse(text))) == parse(text)
    assert hash(parse(text)) == hash(parse(str(parse(text))))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a name"),
        ("a b", "expected a name, or name"),
        ("a(b", "expected a name, or name"),
        ("a(b=)", "between the brackets of 'a\\(b=\\)'"),
        ("a(1)", "every option of 'a\\(1\\)' as name=value"),
        ("a(**b)", "as name=value"),
        ("a(b=1+x)", "expected a number, a word"),
        ("a(b=c(1))", "as name=value"),
        ("a(b=c.d)", "got 'c.d'"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(text: str, message: str):
    with pytest.raises(ValueError, match=message) as refused:
        parse(text)
    assert "\n" not in str(refused.value)


def test_parts_are_split_outside_brackets():
    assert split("a, b(c=[1,2],d=3) ,e", ",") == ["a", "b(c=[1,2],d=3)", "e"]
    assert split("a+b(c=1e+5)", "+") == ["a", "b(c=1e+5)"]


def test_a_variant_is_composed_of_another_remedies_and_an_initialiser():
    found = variant_of("deescalated( tau=0.5 ) + residual-weight(alpha=0.3) @ xavier")
    assert (found.wiring, found.initialiser, found.based_on) == ("post", "xavier", "deescalated")
    assert found.remedies == (Named.of("de-escalation", tau=0.5), Named.of("residual-weight", alpha=0.3))
    assert found.name == "deescalated(tau=0.5)+residual-weight(alpha=0.3)@xavier"
    assert variant_of(found.name) == found
    assert variant_of(found) is found
    assert VARIANTS["deescalated"].remedies == (Named.of("de-escalation", tau=1.0),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pots", "unknown variant 'pots': did you mean 'post'"),
        ("post+", "expected a variant as NAME"),
        ("post@", "expected a variant as NAME"),
        ("+de-escalation", "expected a variant as NAME"),
        ("post(tau=0.5)", "'post' has 0 remedies, so that options in brackets say nothing"),
        ("post+de-escalation(tau)", "as name=value"),
    ],
)
def test_a_mistake_in_a_variant_is_one_line(text: str, message: str):
    with pytest.raises(ValueError, match=message) as refused:
        variant_of(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("post+de-escalaton", "de-escalation"),
        ("deescalated(tua=0.5)", "tua"),
        ("deescalated(tau=1.5)", r"expected tau in \[0, 1\]"),
        ("post@xaver", "unknown initialiser 'xaver': did you mean 'xavier'"),
    ],
)
def test_what_does_not_exist_is_refused_before_anything_is_drawn(variant: str, message: str):
    with pytest.raises(ValueError, match=message):
        build_vit(tiny_config(variant=variant), image_size=8, channels=1)


def test_a_composed_variant_is_the_model_it_says():
    model = build_vit(tiny_config(variant="pre+de-escalation(tau=0.5, every=2)@xavier"), image_size=8, channels=1)
    (found,) = applied(model)
    assert (found.block, found.values["tau"]) == ("encoder.blocks.1", 0.5)
    block = model.encoder.blocks[0]
    assert block.wiring.name == "pre"
    assert (block.attention.value.bias == 0).all()  # Xavier's
    assert isinstance(model.encoder.final_norm, torch.nn.LayerNorm)
    without = build_vit(tiny_config(variant="pre", final_norm=False), image_size=8, channels=1)
    assert isinstance(without.encoder.final_norm, torch.nn.Identity)


@pytest.mark.parametrize(
    ("variant", "rate"),
    [
        ("pre", 2.0),
        ("deescalated", 3.0),
        ("deescalated(tau=0.5)@xavier", 3.0),  # the same remedies
        ("deescalated+residual-weight(alpha=0.5)", 1.0),  # one more: its wiring's
        ("post+de-escalation", 1.0),
        ("pre-final-norm", 2.0),
    ],
)
def test_a_variant_that_a_recipe_does_not_name_has_its_wirings_rate(variant: str, rate: float):
    assert learning_rate_for(variant_of(variant), RATES) == rate


def test_a_wiring_that_a_recipe_does_not_know_has_the_least_rate():
    assert learning_rate_for(Variant("new", "", "new-wiring"), RATES) == 1.0


def test_a_new_wiring_is_a_function_and_a_line_and_then_a_variant_of_every_recipe():
    def add_gain(block) -> None:
        block.gain = torch.nn.Parameter(torch.full((), block.number / block.depth))

    def run(block, x, given):
        return x + block.gain * (run_pre_norm(block, x, given) - x)

    WIRINGS.register(Wiring("gained", run, final_norm=True, placement="pre", prepare=add_gain))
    VARIANTS.register(Variant("gained", "pre-norm with a gain per block", "gained"))
    try:
        model = build_vit(vit_digits("gained").changed(depth=4, width=8, heads=2), image_size=8, channels=1)
        assert [block.gain.item() for block in model.encoder.blocks] == [0.25, 0.5, 0.75, 1.0]
        model(torch.zeros(1, 1, 8, 8)).sum().backward()
        assert all(block.gain.grad is not None for block in model.encoder.blocks)
        language = task_of(small("gained")).build()
        assert [block.gain.item() for block in language.blocks] == [0.5, 1.0]
        assert language(torch.zeros(1, 3, dtype=torch.int64)).hidden.isfinite().all()
        assert vit_digits("gained").lr == 0.5e-4
    finally:
        WIRINGS.unregister("gained")
        VARIANTS.unregister("gained")


def test_a_legend_has_the_words_of_the_record():
    assert [label_of(name) for name in ("post", "pre", "deescalated")] == ["post-norm", "pre-norm", "de-escalated"]
    assert label_of("deescalated(tau=0.5)") == "deescalated(tau=0.5)"
    assert label_of("of a package that is gone") == "of a package that is gone"
    assert len({label_of(name) for name in VARIANTS}) == len(VARIANTS)
    VARIANTS.register(Variant("new", "a title", "post"))
    try:
        assert label_of("new") == "a title"
    finally:
        VARIANTS.unregister("new")


def test_folders_have_no_brackets_and_no_spaces():
    assert folder_name("deescalated") == "deescalated"
    composed = "post+de-escalation(at=output, tau=0.5)@xavier"
    assert folder_name(composed) == "post+de-escalation_at=output_tau=0.5_@xavier"


@pytest.mark.parametrize(
    "text",
    [
        "deescalated(name=3)",
        "deescalated(cls=1)",
        "deescalated(self=1)",
        "deescalated(tau={[]:1})",
        "deescalated(tau=" + "-" * 5000 + "1)",
        "deescalated(tau=0.5,tau=0.6)",
        "post+residual-weight(remedy='de-escalation')",
        "post+de-escalation(tau=0.5,mixing=full,allow_leak=maybe)",
        "post+de-escalation(tau=true)",
        "post+residual-weight(alpha=true)",
        "post+residual-weight(alfa=0.5)",
    ],
)
def test_a_variant_that_says_nonsense_is_a_value_error_of_one_line(text: str):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        [remedy_of(named) for named in variant_of(text).remedies]
    assert len(str(error.value).splitlines()) == 1


def test_yes_and_no_are_truths():
    (leaking,) = variant_of("post+de-escalation(mixing=full, allow_leak=yes)").remedies
    (honest,) = variant_of("post+de-escalation(mixing=full, allow_leak=no)").remedies
    assert (remedy_of(leaking).allow_leak, remedy_of(honest).allow_leak) == (True, False)


def test_a_remedy_in_some_blocks_is_built_and_estimated():
    config = vit_digits("post+residual-weight(alpha=0.5, blocks=[2, 4])").changed(depth=4, width=16)
    assert estimate(config).parameters == estimate(vit_digits("post").changed(depth=4, width=16)).parameters
    model = make_task(config, empty=True).build()
    assert [entry.block for entry in applied(model)][::2] == ["encoder.blocks.1", "encoder.blocks.3"]


OF_THEIR_OWN = ("de-escalation", "reparameterise")  # the first is `deescalated`, the second has many forms


@pytest.mark.parametrize("name", [name for name in REMEDIES.ours() if name not in OF_THEIR_OWN])
def test_every_published_remedy_is_a_variant_that_learns(name: str):
    variant = VARIANTS[name]
    assert (variant.wiring, [remedy.name for remedy in variant.remedies]) == ("post", [name])
    model = build_vit(tiny_config(variant=name, depth=3), image_size=8, channels=1)
    images = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    before, plain = model(images), build_vit(tiny_config(variant="post", depth=3), image_size=8, channels=1)(images)
    assert not torch.equal(before, plain)
    before.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.encoder.blocks.parameters())


@pytest.mark.parametrize("name", [wiring.name for wiring in PUBLISHED])
def test_every_published_wiring_is_a_variant_that_learns(name: str):
    variant = VARIANTS[name]
    assert (variant.wiring, variant.remedies) == (name, ())
    model = build_vit(tiny_config(variant=name, depth=5), image_size=8, channels=1)
    assert model.encoder.blocks[-1].depth == 5
    loss = model(torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))).square().sum()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.encoder.blocks.parameters())
