"""What `depth-language` trains: narrow, deep causal Transformers on the letters of Python's manual."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthscope.probing.roles import MEASURES
from depthscope.probing.skipping import skip_loss
from depthscope.progress import Share
from depthscope.theory import Gains, prescribe
from depthscope.watching import watch
from depthscope_lab.papers.trained import loss_of_task, means_of_task, steps
from depthscope_lab.training.characters import CharacterModelling
from depthscope_lab.training.config import CharacterConfig
from depthscope_lab.training.data.characters import Characters
from depthscope_lab.training.kept import kept
from depthscope_lab.training.recipes import lm_manual
from depthscope_lab.training.schedule import learning_rate

PRESCRIBED, ALPHA, TAU = "prescription", "α alone", "τ alone"


POST, PRE, DEEP_NORM, LAYER_SCALE = "post-norm", "pre-norm", "DeepNorm", "LayerScale"


UNTOLD, SPARSE = "prescription, not told the frequencies", "prescription, τ in every tenth block"


ROLES = {role: MEASURES[role] for role in ("queries_keys", "values_output")}


STATION = "after_ffn"  # a block's sum before its norm and its de-escalation, which would hide what they undo


COLUMNS = ["step", "block", "quantity", "value"]


@dataclass(frozen=True)
class Training:
    """The shape of the models and of their training, the same for all."""

    depth: int = 100
    width: int = 32
    heads: int = 4
    batch: int = 16
    context: int = 32  # letters of a window
    steps: int = 150
    warm_up: int = 15
    look_every: int = 25  # steps between two looks at similarities and gradients
    windows: int = 256  # of the validation or test text that a loss is taken on
    skip_windows: int = 8  # on which blocks are left out
    hidden_windows: int = 2  # which are also read with the future hidden, in one pass per letter


class Run(NamedTuple):
    """One training. `held_out`: the text that it is judged on, "validation" where a rate is chosen, else "test"."""

    variant: str
    rate: float
    seed: int
    held_out: str


def prescribed(shape: Training) -> tuple[float, float]:
    """α and τ for this depth, to three digits, from what Xavier's weights do (`theory.Gains`).

    W_V and W_O have gain 1; the FFN, twice as wide as a token, has the gains 2/3 and 4/3, whose product ReLU halves.
    """
    found = prescribe(shape.depth, Gains(attention=1.0, ffn=4 / 9, score=1.0, tokens=shape.context))
    return round(found.alpha, 3), round(found.tau, 3)


def notation(variant: str, shape: Training) -> str:
    """The variant as `depthscope train lm-manual --variant` has it. All weights are Xavier's."""
    alpha, tau = prescribed(shape)
    weight, mean = f"residual-weight(alpha={alpha})", f"de-escalation(tau={tau}, at=output)"
    return {
        PRESCRIBED: f"post+{mean}+{weight}",
        UNTOLD: f"post+{mean}+{weight}",
        SPARSE: f"post+de-escalation(tau={tau}, at=output, every=10)+{weight}",
        ALPHA: f"post+{weight}",
        TAU: f"post+{mean}",
        POST: "post",
        PRE: "pre",
        DEEP_NORM: "deep-norm",
        LAYER_SCALE: "layer-scale",
    }[variant] + "@xavier"


def settings(run: Run, shape: Training) -> CharacterConfig:
    """The recipe `lm-manual` in this shape."""
    same = {name: getattr(shape, name) for name in ("depth", "width", "heads", "context", "steps")}
    trained = {"batch_size": shape.batch, "warmup_steps": shape.warm_up, "schedule": "cosine", "lr": run.rate}
    judged = {"eval_windows": shape.windows, "evaluate_on": run.held_out, "seed": run.seed}
    return lm_manual(notation(run.variant, shape)).changed(**same, ffn_width=2 * shape.width, **trained, **judged)


def letter_frequencies(data: Characters) -> Tensor:
    """ln p of every symbol in the training text, each counted once more than it occurs, so that none is impossible."""
    counts = torch.bincount(data.train, minlength=data.symbols).double() + 1
    return (counts / counts.sum()).log().float()


def tell_frequencies(model: nn.Module, data: Characters) -> None:
    """Adds ln p of each letter to the logits, as a fixed bias of the head.

    The head of the model has no bias: to predict how frequent letters are, it needs a part that all tokens have in
    common, which is just what de-escalation takes away. So they are told, and what is left to learn is context.
    """
    bias = letter_frequencies(data)
    model.register_forward_hook(lambda _model, _inputs, logits: logits + bias)


def found_or_trained(run: Run, shape: Training, data: Characters, folder: Path, told: Share) -> pd.DataFrame:
    """The rows of a run: read if they are kept in the folder, else trained."""
    key = {**run._asdict(), "notation": notation(run.variant, shape), **asdict(shape)}  # another shape is another run
    found = kept(folder, key, lambda: trained(run, shape, data, told).to_dict("list"))
    told(1.0)
    return pd.DataFrame(found).astype({"value": float}).assign(**run._asdict())


def trained(run: Run, shape: Training, data: Characters, told: Share) -> pd.DataFrame:
    """Rows step, block (−1 where none), quantity, value.

    loss: of the training, mean since the row before; token_similarity and the gradients' norms by block at every look;
    after the last step held_out (the loss of the held-out text), and where that is the test text `skip` (by which the
    loss rises without a block; block 0: the loss with all) and `hidden` (by how much the loss of any letter differs
    when the future is hidden). A loss that is not finite ends the training: held_out is then nan, and so is the rest.
    """
    config = settings(run, shape)
    task = CharacterModelling(config, data)
    model = task.build().train()
    if run.variant != UNTOLD:
        tell_frequencies(model, data)
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "weight_decay": config.weight_decay,
    }
    optimiser = torch.optim.AdamW(model.parameters(), fused=True, **options)  # 16 small tensors per block
    found: list[tuple[int, int, str, float]] = []
    since: list[float] = []
    rate = partial(learning_rate, config, total=shape.steps)
    looks = watch(model, every=shape.look_every, measures=["token_similarity"], stations=[STATION], gradients=True)
    with looks as watched:
        for step, loss in steps(partial(loss_of_task, task, model), optimiser, shape.steps, rate=rate):
            since.append(loss)
            if failed := not math.isfinite(loss):
                break
            if (step + 1) % shape.look_every == 0 or step + 1 == shape.steps:
                found.append((step + 1, -1, "loss", math.fsum(since) / len(since)))
                since = []
            told((step + 1) / shape.steps)
    seen = watched.records[watched.records["measure"].isin(("token_similarity", *ROLES.values()))]
    seen = seen[seen["block"] > 0].rename(columns={"measure": "quantity"})[COLUMNS]
    ended = pd.DataFrame(_judged(model, task, shape, run), columns=COLUMNS).assign(step=shape.steps)
    ended = ended.assign(value=math.nan) if failed else ended
    return pd.concat([pd.DataFrame(found, columns=COLUMNS), seen, ended], ignore_index=True)


@torch.no_grad()
def _judged(model: nn.Module, task: CharacterModelling, shape: Training, run: Run) -> list[tuple[int, int, str, float]]:
    """The rows after the last step."""
    found = [(0, -1, "held_out", next(iter(means_of_task(task, model).values())))]
    if run.held_out != "test":
        return found
    count = min(max(shape.skip_windows, shape.hidden_windows), len(task.data.test) // shape.context)
    windows = task.data.test[: count * shape.context].reshape(count, shape.context)
    skipped = skip_loss(model, windows[: shape.skip_windows])
    for first, loss, change in zip(skipped["first_block"], skipped["loss"], skipped["change"], strict=True):
        found.append((0, int(first), "skip", float(change if first else loss)))
    return [*found, (0, -1, "hidden", hidden_difference(model, windows[: shape.hidden_windows]))]


@torch.no_grad()
def hidden_difference(model: nn.Module, ids: Tensor) -> float:
    """The greatest difference of a log-probability between one pass and passes that end with the letter that is read.

    ids (windows, n). 0 but for rounding, if no letter sees a later one.
    """
    whole = F.log_softmax(model(ids).double(), dim=-1)
    alone = (F.log_softmax(model(ids[:, : n + 1]).double()[:, -1], dim=-1) for n in range(ids.shape[1]))
    return max((whole[:, n] - found).abs().max().item() for n, found in enumerate(alone))


def carriers(costs: Any, share: float) -> int:
    """The fewest blocks that have this share of all that leaving single blocks out costs; 0 if nothing does."""
    ordered = torch.as_tensor(costs, dtype=torch.float64).clamp(min=0).sort(descending=True).values
    total = ordered.sum()
    return int((ordered.cumsum(0) < share * total * (1 - 1e-12)).sum()) + 1 if total > 0 else 0
