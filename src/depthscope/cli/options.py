"""The options of the commands that look at a model: one dataclass is the command line, its help and what it means.

What stands in no panel is what people use, and what `--help` shows.
"""

# ruff: noqa: RUF009  # a field is what `_option` makes
from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import typer

from depthscope.cli import completion
from depthscope.cli.values import folder, names, number, whole_number

if TYPE_CHECKING:
    from depthscope.discovery import Hints

_INPUT, _MODEL, _MEASURED = "Input", "What you say of the model", "What is measured"
_LARGEST_ALPHA = 1000  # a remedy makes α smaller than 1; beyond this half precision overflows within a few blocks

Loss = Literal["no", "if causal", "where there is one"]
Dtype = Literal["float32", "float64", "bfloat16", "float16"]


def _option(metavar: str, help: str, panel: str | None = None, default: Any = None, **more: Any) -> Any:
    """A field with its option: a `parser` reads and checks what is typed; `name` where it is not the field's."""
    flags = [name] if (name := more.pop("name", "")) else []
    made = typer.Option(*flags, metavar=metavar or None, help=help, rich_help_panel=panel, **more)
    return field(default=default, metadata={"option": made})


def _flag(name: str, help: str, panel: str | None = None) -> Any:
    return _option("", help, panel, False, name=name)


def _count(help: str, panel: str | None = None) -> Any:
    return _option("N", help, panel, parser=whole_number(1))


def _measures(text: str) -> str | list[str]:
    """A group by its name, or a list; `spectral` comes on top of what the verdict asks for."""
    found = names("--measures", text)
    return ["verdict", "spectral"] if found == ["spectral"] else found if len(found) > 1 else found[0]


def _stations(text: str) -> str | list[str]:
    """A group by its name, or a list; `output`, which every summary reads, is always there."""
    found = names("--stations", text)
    is_group = len(found) == 1 and found[0] in ("output", "trunk", "verdict", "all")
    return found[0] if is_group else list(dict.fromkeys([*found, "output"]))


def _tokens(text: str) -> list[int]:
    try:
        return [int(index) for index in names("", text)]
    except ValueError:
        raise ValueError(f"expected indices such as 0,1, got {text!r}") from None


def _parts(text: str) -> tuple[str, ...]:
    from depthscope.hooks.ablation import choose_parts

    return choose_parts(text)


_ARGUMENT = typer.Argument(
    metavar="MODEL",
    autocompletion=completion.models,
    help="A family with random weights (bert, gpt2, vit, llama, encoder, …), hf:NAME_OR_FOLDER, module:factory, a "
    "function in your code that returns (model, inputs), or (probe) states:FOLDER, hidden states that were saved.",
)


@dataclass(frozen=True)
class WeightOptions:
    """Which model. `None` means not asked for, so that what does not fit can be refused."""

    model: str = field(metadata={"option": _ARGUMENT})
    depth: int | None = _count("Number of blocks, of a family.")
    width: int | None = _count("Width of a token, of a family.", _MODEL)
    heads: int | None = _count("Attention heads per block, of a family.", _MODEL)
    seed: int = _option("N", "Seed of random weights and input.", _INPUT, 0, parser=whole_number(0))
    device: str = _option("", "Where to compute: cpu, cuda, cuda:1, mps.", default="cpu")
    dtype: Dtype | None = _option("DTYPE", "float32, float64, bfloat16 or float16.", _MODEL)
    blocks: str | None = _option("PATTERN", "Names of the blocks of an unknown model: 'encoder.layer.*'.", _MODEL)
    part: str | None = _option("PART", "The only part to look at: encoder, decoder, …", _MODEL)
    out: Path | None = _option("DIR", "Save numbers, picture and report.", parser=folder)
    json: bool = _flag("--json", "Print one JSON object and nothing else.")
    full: bool = _flag("--full", "Print every table and note, not twenty lines.")
    trust_remote_code: bool = _flag("--trust-remote-code", "Run code that comes with an hf: model.", _MODEL)

    loss: ClassVar[Loss] = "no"  # whether a language model is to be built with its head, so that it has a loss


@dataclass(frozen=True)
class ModelOptions(WeightOptions):
    """Which model, and what it reads."""

    usual_tokens: ClassVar[int] = 128
    usual_samples: ClassVar[int] = 8

    text: Path | None = _option("FILE", "Text to read, UTF-8; else Python's own manual.", parser=folder)
    tokens: int | None = _count("Tokens per sequence; 128 (64 for paths) if it takes as many.")
    samples: int | None = _count("Sequences or images; fewer beyond 4096 tokens.  [8; 2 for paths]")
    batch: int | None = _count("Sequences at a time.  [8]", _INPUT)
    images: Path | None = _option("DIR", "Images to see (png, jpg); else random ones.", _INPUT, parser=folder)
    token_axis: int | None = _option(
        "0|1", "1 for activations (batch, n, d), 0 for (n, batch, d).", _MODEL, min=0, max=1
    )
    causal: bool | None = _option(
        "", "Whether no token sees a later one; else found by trying.", _MODEL, name="--causal/--no-causal"
    )
    mask: str | None = _option("NAME", "The model's argument that is true for real tokens (~NAME: padding).", _MODEL)

    @property
    def hints(self) -> Hints:
        """What the user says of the model, in the words of `Scope`."""
        return {
            "blocks": self.blocks,
            "part": self.part,
            "token_axis": self.token_axis,
            "causal": self.causal,
            "mask": self.mask,
        }


@dataclass(frozen=True)
class SpectraOptions(WeightOptions):
    """What a user asks of `depthscope spectra`."""

    product: Literal["value-output", "query-key"] = _option(
        "", "Which product of weights: W_V W_O, or W_Q W_K\u1d40.", default="value-output"
    )
    heads_only: bool = _flag("--heads-only", "Leave out the whole block, which is slow.")


@dataclass(frozen=True)
class ProbeOptions(ModelOptions):
    """What a user asks of `depthscope probe`."""

    measures: Any = _option(
        "NAMES", "verdict (what it asks for), light, spectral, all, or names.", default="verdict", parser=_measures
    )
    stations: Any = _option(
        "NAMES",
        "verdict (trunk,attention_input), output, trunk, all, or names with commas (output is added).",
        _MEASURED,
        "verdict",
        parser=_stations,
    )
    exclude_tokens: Any = _option("TOKENS", "Tokens to leave out: indices such as 0,1.", _MEASURED, parser=_tokens)
    without: Any = _option(
        "PARTS",
        "Leave parts out of every block: skips, ffn, norms, or attention_skip, ffn_skip, cross_attention_skip, "
        "ffn_step, ffn_linears; with commas.",
        _MEASURED,
        parser=_parts,
    )
    gradients: bool = _flag("--gradients", "Also gradient norms.", _MEASURED)
    estimate: bool = _flag("--estimate", "Estimate the remedy of a collapsed model; do not measure it.", _MEASURED)
    fail_on: list[str] | None = _option(
        "CONDITION",
        'Exit with code 3 if it holds: "token_similarity>0.95" at the last block, or "… at block 12", "… in any '
        'block". Can be repeated.',
    )


@dataclass(frozen=True)
class FixOptions(ModelOptions):
    """What a user asks of `depthscope fix`."""

    loss: ClassVar[Loss] = "if causal"  # shown before and after

    tau: Any = _option(
        "TAU", "De-escalate so strongly: 0 to 1, or recommended, measured.", parser=number(0, 1, "recommended")
    )
    alpha: float | None = _option(
        "ALPHA", "Weight of both branches; else 1, or what is recommended.", parser=number(0, _LARGEST_ALPHA)
    )


@dataclass(frozen=True)
class PathsOptions(ModelOptions):
    """What a user asks of `depthscope paths`, whose work grows with the square of the blocks: half a minute for 30."""

    usual_tokens: ClassVar[int] = 64
    usual_samples: ClassVar[int] = 2


@dataclass(frozen=True)
class DepthOptions(ModelOptions):
    """What a user asks of `depthscope depth`."""

    loss: ClassVar[Loss] = "where there is one"  # the lens reads the head, and skipping changes a loss

    quick: bool = _flag("--quick", "One pass alone: no logit lens, no skipped blocks.")
