"""Gradients of watched steps: those of the training step itself, by role and by writer; training stays as it was."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import depthscope
from depthscope.measures import mean_coherent_share, token_sum
from depthscope.models import BlockConfig, Encoder, pre_norm
from depthscope.watching import load_records
from samples import seeded
from traces import state_of
from zoo import MASK, TOKENS, make

FAMILIES = ("encoder", "bert", "gpt2", "opt", "torch-tokens-first", "t5", "albert", "mixtral", "falcon-new", "swin")


def encoder(**options: Any) -> Encoder:
    return Encoder(3, BlockConfig(16, 4, **options), generator=seeded(0)).train()


def loss_of(output: Any) -> Tensor:
    items = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else (output,)
    return sum(x.float().square().mean() for x in items if isinstance(x, Tensor) and x.is_floating_point())  # type: ignore[return-value]


def step(model: nn.Module, inputs: Any, optimizer: torch.optim.Optimizer) -> float:
    loss = loss_of(model(**inputs) if isinstance(inputs, dict) else model(inputs))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("name", FAMILIES)
def test_training_is_bitwise_the_same_and_no_hook_is_left(name: str):
    outcomes = []
    for watched in (False, True):
        model, inputs = make(name)
        model.train()
        torch.manual_seed(5)  # of dropout
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        before = state_of(model)["hooks"]
        if watched:
            with depthscope.watch(model, every=2, gradients=True) as watch:
                losses = [step(model, inputs, optimizer) for _ in range(3)]
                assert all(not p._backward_hooks for p in model.parameters())  # none waits for a gradient that came
            assert state_of(model)["hooks"] == before
            taken = set(watch.records["measure"]) & {"queries_keys_gradient", "mean_coherent_share"}
            assert taken == (set() if name == "albert" else {"queries_keys_gradient", "mean_coherent_share"})
        else:
            losses = [step(model, inputs, optimizer) for _ in range(3)]
        outcomes.append((losses, [p.detach().clone() for p in model.parameters()]))
    assert outcomes[0][0] == outcomes[1][0]
    assert all(torch.equal(a, b) for a, b in zip(outcomes[0][1], outcomes[1][1], strict=True))


def test_the_numbers_are_those_of_the_training_step():
    """Roles from p.grad; shares from the layer's own input and the gradient of its output, with padding left out."""
    model = encoder().double()
    read: dict[str, Tensor] = {}
    wrote: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            read[name] = args[0].detach()
            output.register_hook(lambda g: wrote.__setitem__(name, g))

        return hook

    writers = {"attention_branch": model.blocks[1].attention.output, "ffn_branch": model.blocks[1].ffn[2]}
    for name, layer in writers.items():
        layer.register_forward_hook(keep(name))
    weights = torch.randn(TOKENS.shape, generator=seeded(3), dtype=torch.float64)
    with depthscope.watch(model, every=1, gradients=True) as watch:
        (weights * model(TOKENS.double(), MASK.bool()) * MASK.unsqueeze(-1)).sum().backward()
    frame = watch.records.set_index(["station", "measure", "block"])["value"]
    block = model.blocks[1]
    for measure, layers in (
        ("queries_keys_gradient", (block.attention.query, block.attention.key)),
        ("values_output_gradient", (block.attention.value, block.attention.output)),
        ("ffn_gradient", (block.ffn,)),
        ("norms_gradient", (block.norm1, block.norm2)),
    ):
        whole = torch.cat([p.grad.flatten() for layer in layers for p in layer.parameters()])
        assert frame["output", measure, 2] == pytest.approx(whole.norm().item(), rel=1e-12)
    for station, layer in writers.items():
        sums = (token_sum(tokens, MASK.bool()) for tokens in (read[station], wrote[station]))
        expected = mean_coherent_share(layer.weight.grad.mT, *sums)
        assert frame[station, "mean_coherent_share", 2] == pytest.approx(expected.item(), rel=1e-9)


def shares_of(watch: depthscope.watching.Watch) -> Any:
    rows = watch.records.query("measure == 'mean_coherent_share' and station == 'ffn_branch'")
    return rows.set_index("block")["value"]


def test_a_writer_with_the_means_gradient_alone_has_share_one():
    model = encoder(placement=pre_norm)
    direction = torch.randn(16, generator=seeded(1))
    model.final_norm = nn.Identity()
    with depthscope.watch(model, every=1, gradients=True) as watch:
        (model(TOKENS) @ direction).sum().backward()  # every token of the last block asks for the same
    shares = watch.records.query("measure == 'mean_coherent_share' and station == 'ffn_branch'").set_index("block")[
        "value"
    ]
    assert shares[3] == pytest.approx(1, abs=1e-6)
    assert shares[1] < 0.999
    centred = torch.randn(2, 7, 16, generator=seeded(2))
    centred -= centred.mean(dim=1, keepdim=True)
    with depthscope.watch(model, every=1, gradients=True) as watch:
        (model(TOKENS) * centred).sum().backward()
    shares = watch.records.query("measure == 'mean_coherent_share' and station == 'ffn_branch'").set_index("block")[
        "value"
    ]
    assert shares[3] < 1e-10


def test_equal_tokens_teach_queries_and_keys_nothing():
    model = encoder().double()
    equal = TOKENS[:, :1].double().expand(2, 7, 16)
    weights = torch.randn(TOKENS.shape, generator=seeded(3), dtype=torch.float64)
    with depthscope.watch(model, every=1, gradients=True) as watch:
        (weights * model(equal)).sum().backward()
    frame = watch.records.set_index(["measure", "block"])["value"]
    for block in (1, 2, 3):
        assert frame["queries_keys_gradient", block] < 1e-14 * frame["values_output_gradient", block]
    assert watch.scalars()["depth/attention_learns"] == 0


def test_records_scalars_and_lines_come_after_the_backward_pass(tmp_path: Path):
    model, said = encoder(), []
    path = tmp_path / "depth.jsonl"
    with depthscope.watch(
        model, every=2, gradients=True, path=path, on_record=lambda number, scalars: said.append((number, scalars))
    ) as watch:
        for _ in range(3):
            loss = model(TOKENS).square().mean()
            loss.backward()
    assert [number for number, _ in said] == [0, 0, 2, 2]
    assert "depth/t_sim_last" in said[0][1]
    assert "depth/attention_learns" not in said[0][1]
    assert set(said[1][1]) == {"depth/attention_learns", "depth/coherent_share_max"}
    assert watch.scalars() == said[2][1] | said[3][1]
    assert len(path.read_text().splitlines()) == 4
    written = load_records(path).sort_values(["step", "station", "measure", "block"]).reset_index(drop=True)
    kept = watch.records.sort_values(["step", "station", "measure", "block"]).reset_index(drop=True)
    assert written.equals(kept)
    assert json.loads(path.read_text().splitlines()[-1])["curves"]["output"]["ffn_gradient"][0] is None
    assert "queries_keys_gradient_last" not in str(watch.scalars())
    watch.heat_map("queries_keys_gradient")


def test_weights_without_a_gradient_do_not_hold_the_rest_up():
    model = encoder()
    model.blocks[0].unused = nn.Linear(16, 16)
    with depthscope.watch(model, every=1, gradients=True) as watch:
        model(TOKENS).square().mean().backward()
        assert "ffn_gradient" in set(watch.records["measure"])
        assert all(not p._backward_hooks for p in model.parameters())


def test_a_step_without_a_backward_pass_leaves_no_hook():
    model = encoder()
    with depthscope.watch(model, every=1, gradients=True) as watch:
        model(TOKENS)
        assert "ffn_gradient" not in set(watch.records["measure"])
        model(TOKENS).sum().backward()
        model(TOKENS)
    assert all(not p._backward_hooks for p in model.parameters())
    steps = watch.records.query("measure == 'ffn_gradient'")["step"].unique().tolist()
    assert steps == [1]


def test_frozen_weights_have_no_part_in_it():
    model = encoder()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("query" in name or "key" in name)
    with depthscope.watch(model, every=1, gradients=True) as watch:
        model(TOKENS).square().mean().backward()
    found = set(watch.records["measure"])
    assert "queries_keys_gradient" in found
    assert not found & {"values_output_gradient", "ffn_gradient", "mean_coherent_share"}
    assert "depth/attention_learns" not in watch.scalars()


def test_a_wrong_option_is_refused():
    with pytest.raises(ValueError, match="expected gradients= to be True or False"):
        depthscope.watch(encoder(), gradients="outputs")  # type: ignore[arg-type]


def test_a_rule_on_gradients_is_asked_when_they_have_come():
    model = encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    equal = torch.ones(2, 5, 16)  # equal tokens: queries and keys get no gradient
    different = torch.randn(2, 5, 16, generator=seeded(1))
    alarms: list[Any] = []
    rules = {"stop_if": "queries_keys_gradient<1e-9 at block 1 for 2 after 0", "on_alarm": alarms.append}
    with depthscope.watch(model, every=1, gradients=True, **rules) as watch:
        for tokens in (different, equal, different, equal, equal):
            assert not watch.should_stop
            step(model, tokens, optimizer)
    assert watch.should_stop
    assert [(alarm.since, alarm.step, alarm.good, alarm.block) for alarm in alarms] == [(3, 4, 2, 1)]
    assert "queries and keys do not learn" in str(alarms[0])


def test_a_rule_on_gradients_needs_them():
    with pytest.raises(ValueError, match="'queries_keys_gradient', which is not measured"):
        depthscope.watch(encoder(), stop_if="queries_keys_gradient<1e-9")
    with pytest.raises(ValueError, match="say at which branch"):
        depthscope.watch(encoder(), gradients=True, stop_if="mean_coherent_share>0.9")


def test_a_rule_on_gradients_does_not_wait_for_a_weight_that_gets_none():
    model = encoder()
    model.blocks[0].unused = nn.Linear(16, 16)
    rules = {"stop_if": "queries_keys_gradient<1e-9 at block 1 after 0", "on_alarm": lambda _alarm: None}
    with depthscope.watch(model, every=1, gradients=True, **rules) as watch:
        model(torch.ones(2, 5, 16)).square().mean().backward()
        assert watch.should_stop


def test_a_model_whose_queries_and_keys_are_not_known_says_so():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.mlp = nn.MultiheadAttention(16, 4, batch_first=True), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.mix(x, x, x, need_weights=False)[0]
            return x + self.mlp(x).relu()

    model = nn.Sequential(Own(), Own(), Own())
    with pytest.warns(UserWarning, match="which weights of this model are queries and keys is not known"):
        watch = depthscope.watch(model, every=1, gradients=True)
    with watch:
        model(torch.randn(2, 5, 16, generator=seeded(0))).square().mean().backward()
    assert "depth/attention_learns" not in watch.scalars()
    assert "depth/t_sim_last" in watch.scalars()
