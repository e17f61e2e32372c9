"""The options of the commands that look at a model: one dataclass is the command line, its help and what it means.

What stands in no panel is what people use, and what `--help` shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from typer import Argument, Option

from depthscope.cli import completion
from depthscope.cli.values import counted, folder, names, number, seed

if TYPE_CHECKING:
    from depthscope.discovery import Hints

_INPUT, _MODEL, _MEASURED, _REMEDY = "Input", "What you say of the model", "What is measured", "Remedy"
_LARGEST_ALPHA = 1000  # a remedy makes α smaller than 1; beyond this half precision overflows within a few blocks

Loss = Literal["no", "if causal", "where there is one", "required"]


def _option(help: str, panel: str | None = None, *, name: str = "", **more: Any) -> Any:
    return Option(*filter(None, [name]), help=help, rich_help_panel=panel, **more)


def _measures(text: str) -> str | list[str]:
    """A group by its name, or a list; `spectral` comes on top of what the verdict asks for."""
    found = names("--measures", text)
    return ["verdict", "spectral"] if found == ["spectral"] else found if len(found) > 1 else found[0]


def _stations(text: str) -> str | list[str]:
    """A group by its name, or a list; `output`, which every summary reads, is always there."""
    found = names("--stations", text)
    is_group = len(found) == 1 and found[0] in ("output", "trunk", "all")
    return found[0] if is_group else list(dict.fromkeys([*found, "output"]))


def _tokens(text: str) -> list[int]:
    try:
        return [int(index) for index in names("", text)]
    except ValueError:
        raise ValueError(f"expected indices such as 0,1, got {text!r}") from None


def _parts(text: str) -> tuple[str, ...]:
    from depthscope.hooks.ablation import choose_parts

    return choose_parts(text)


def _tau(text: str) -> float | str:
    try:
        return text if text == "recommended" else number(0, 1)(text)
    except ValueError:
        raise ValueError(f"expected a number in [0, 1], or recommended, got {text!r}") from None


@dataclass(frozen=True)
class WeightOptions:
    """Which model. `None` means not asked for, so that what does not fit can be refused."""

    model: Annotated[
        str,
        Argument(
            metavar="MODEL",
            autocompletion=completion.models,
            help="A family with random weights (bert, gpt2, vit, llama, encoder, …), hf:NAME_OR_FOLDER (or a GGUF "
            "file), module:factory, a function in your code that returns a model or (model, inputs), or, for probe, "
            "states:FOLDER, hidden states that were saved.",
        ),
    ]
    depth: Annotated[int | None, counted("Number of blocks, of a family.")] = None
    width: Annotated[int | None, counted("Width of a token, of a family.", _MODEL)] = None
    heads: Annotated[int | None, counted("Attention heads per block, of a family.", _MODEL)] = None
    seed: Annotated[int, _option("Seed of random weights and input.", _INPUT, metavar="N", parser=seed)] = 0
    device: Annotated[str, _option("Where to compute: cpu, cuda, cuda:1, mps.")] = "cpu"
    dtype: Annotated[
        Literal["float32", "float64", "bfloat16", "float16"] | None,
        _option("float32, float64, bfloat16 or float16.", _MODEL, metavar="DTYPE"),
    ] = None
    blocks: Annotated[
        str | None,
        _option("Names of the blocks of an unknown model: 'encoder.layer.*'.", _MODEL, metavar="PATTERN"),
    ] = None
    part: Annotated[str | None, _option("The only part to look at: encoder, decoder, …", _MODEL, metavar="PART")] = None
    out: Annotated[Path | None, _option("Save numbers, picture and report.", metavar="DIR", parser=folder)] = None
    json: Annotated[bool, _option("Print one JSON object and nothing else.", name="--json")] = False
    full: Annotated[bool, _option("Print every table and note, not twenty lines.", name="--full")] = False
    trust_remote_code: Annotated[
        bool, _option("Run code that comes with an hf: model.", _MODEL, name="--trust-remote-code")
    ] = False

    @property
    def loss(self) -> Loss:
        """Whether a language model is to be built with its head, so that it has a loss."""
        return "no"


@dataclass(frozen=True)
class ModelOptions(WeightOptions):
    """Which model, and what it reads."""

    usual_tokens: ClassVar[int] = 128
    usual_samples: ClassVar[int] = 8

    text: Annotated[
        Path | None, _option("Text to read, UTF-8; else Python's own manual.", metavar="FILE", parser=folder)
    ] = None
    tokens: Annotated[int | None, counted("Tokens per sequence; 128 (64 for paths) if it takes as many.")] = None
    samples: Annotated[int | None, counted("Sequences or images; fewer beyond 4096 tokens.  [8; 2 for paths]")] = None
    batch: Annotated[int | None, counted("Sequences at a time.  [8]", _INPUT)] = None
    images: Annotated[
        Path | None, _option("Images to see (png, jpg); else random ones.", _INPUT, metavar="DIR", parser=folder)
    ] = None
    token_axis: Annotated[
        int | None,
        _option(
            "1 for activations (batch, n, d), 0 for (n, batch, d); else found by trying.",
            _MODEL,
            metavar="0|1",
            min=0,
            max=1,
        ),
    ] = None
    causal: Annotated[
        bool | None,
        _option("Whether no token sees a later one; else found by trying.", _MODEL, name="--causal/--no-causal"),
    ] = None
    mask: Annotated[
        str | None,
        _option(
            "The model's argument that is true for real tokens; ~ARGUMENT if it is true for padding.",
            _MODEL,
            metavar="ARGUMENT",
        ),
    ] = None

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

    product: Annotated[
        Literal["value-output", "query-key"], _option("Which product of weights: W_V W_O, or W_Q W_K\u1d40.")
    ] = "value-output"
    fold_norm: Annotated[
        bool, _option("With the norm before attention (pre-norm models).", _MEASURED, name="--fold-norm")
    ] = False
    heads_only: Annotated[bool, _option("Leave out the whole block, which is slow.", name="--heads-only")] = False


@dataclass(frozen=True)
class ProbeOptions(ModelOptions):
    """What a user asks of `depthscope probe`."""

    measures: Annotated[
        Any,
        _option(
            "verdict (what the verdict asks for), default (fewer), spectral, all, or names with commas.",
            metavar="NAMES",
            parser=_measures,
        ),
    ] = "verdict"
    stations: Annotated[
        Any,
        _option(
            "output, trunk, all, or names with commas (output is added).",
            _MEASURED,
            metavar="NAMES",
            parser=_stations,
            show_default="trunk,attention_input",
        ),
    ] = "trunk,attention_input"
    exclude_tokens: Annotated[
        Any,
        _option("Tokens to leave out: indices such as 0,1.", _MEASURED, metavar="TOKENS", parser=_tokens),
    ] = None
    without: Annotated[
        Any,
        _option(
            "Leave parts out of every block: skips, ffn, norms, or attention_skip, ffn_skip, cross_attention_skip, "
            "ffn_step, ffn_linears; with commas.",
            _MEASURED,
            metavar="PARTS",
            parser=_parts,
        ),
    ] = None
    skip_loss: Annotated[
        bool, _option("Also the loss without each block (language models).", _MEASURED, name="--skip-loss")
    ] = False
    skip_run: Annotated[int, counted("With --skip-loss: how many blocks in a row to skip.", _MEASURED)] = 1
    gradients: Annotated[bool, _option("Also gradient norms.", _MEASURED, name="--gradients")] = False
    depth_use: Annotated[
        bool, _option("Also which blocks matter, as `depth` measures it.", _MEASURED, name="--depth-use")
    ] = False
    estimate: Annotated[
        bool,
        _option("Estimate the remedy of a collapsed model instead of measuring it.", _MEASURED, name="--estimate"),
    ] = False
    fail_on: Annotated[
        list[str] | None,
        _option(
            'Exit with code 3 if it holds: "token_similarity>0.95" at the last block, or "… at block 12", "… in any '
            'block". Can be repeated.',
            metavar="CONDITION",
        ),
    ] = None

    @property
    def loss(self) -> Loss:
        """Skipping blocks changes a loss; the use of depth can do without."""
        return "required" if self.skip_loss else "where there is one" if self.depth_use else "no"


@dataclass(frozen=True)
class FixOptions(ModelOptions):
    """What a user asks of `depthscope fix`."""

    tau: Annotated[
        Any,
        _option("De-escalate so strongly: a number in [0, 1], or recommended, measured.", metavar="TAU", parser=_tau),
    ] = None
    at: Annotated[
        Literal["input", "after_attention", "ffn_input", "output"],
        _option("Station of the residual stream where the mean is taken out.", _REMEDY),
    ] = "output"
    mixing: Annotated[
        Literal["auto", "full", "prefix", "ema"],
        _option("Which mean; auto: full, or prefix in causal models.", _REMEDY),
    ] = "auto"
    level: Annotated[
        float | None,
        _option(
            "Similarity that the recommended τ is to hold.  [that at the entrance, 0.1 to 0.5]",
            _REMEDY,
            metavar="SIMILARITY",
            parser=number(0, 1, ends=False),
        ),
    ] = None
    alpha: Annotated[
        float | None,
        _option(
            "Weight of both branches; else 1, or what is recommended.",
            _REMEDY,
            metavar="ALPHA",
            parser=number(0, _LARGEST_ALPHA),
        ),
    ] = None

    @property
    def loss(self) -> Loss:
        """Shown before and after, where there is one."""
        return "if causal"


@dataclass(frozen=True)
class PathsOptions(ModelOptions):
    """What a user asks of `depthscope paths`, whose work grows with the square of the blocks: half a minute for 30."""

    usual_tokens: ClassVar[int] = 64
    usual_samples: ClassVar[int] = 2


@dataclass(frozen=True)
class DepthOptions(ModelOptions):
    """What a user asks of `depthscope depth`."""

    quick: Annotated[bool, _option("One pass alone: no logit lens, no skipped blocks.", name="--quick")] = False
    skips: Annotated[
        bool | None,
        _option(
            "What becomes of later blocks, output and loss without each block: a pass per block.  [--skips]",
            _MEASURED,
            name="--skips/--no-skips",
        ),
    ] = None

    @property
    def loss(self) -> Loss:
        """The lens reads the head, and skipping changes a loss."""
        return "where there is one"
