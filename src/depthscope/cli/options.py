"""The options of a command: one dataclass is the command line, its help and what the parts receive."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_type_hints

from typer import Argument, Option

from depthscope.cli import completion
from depthscope.cli.ending import ending_in_order
from depthscope.cli.folders import folder
from depthscope.cli.help import counted
from depthscope.cli.help import seed as seed_of

if TYPE_CHECKING:
    from depthscope.discovery import Hints

_SHAPE, _INPUT, _PROBE, _RESULT = "Shape of a family", "Input", "What is measured", "What comes out"
_REMEDY, _TOLD = "Remedy", "What you say of the model"


@dataclass(frozen=True)
class WeightOptions:
    """Which model. `None` means not asked for, so that what does not fit can be refused."""

    model: Annotated[
        str,
        Argument(
            metavar="MODEL",
            autocompletion=completion.models,
            help="A family with random weights (bert, gpt2, vit, llama, encoder, …), hf:NAME_OR_FOLDER (or a GGUF "
            "file), or module:factory, a function in your code that returns a model or (model, inputs).",
        ),
    ]
    depth: Annotated[int | None, counted("Number of blocks.", _SHAPE)] = None
    width: Annotated[int | None, counted("Width of a token.", _SHAPE)] = None
    heads: Annotated[int | None, counted("Attention heads per block.", _SHAPE)] = None
    seed: Annotated[
        int,
        Option(metavar="N", parser=seed_of, help="Seed of random weights and random input.", rich_help_panel=_INPUT),
    ] = 0
    device: Annotated[str, Option(help="Where to compute: cpu, cuda, cuda:1, mps.", rich_help_panel=_PROBE)] = "cpu"
    dtype: Annotated[
        Literal["float32", "float64", "bfloat16", "float16"] | None,
        Option(metavar="DTYPE", help="float32, float64, bfloat16 or float16.", rich_help_panel=_PROBE),
    ] = None
    blocks: Annotated[
        str | None,
        Option(
            metavar="PATTERN",
            help="Names of the blocks in a model that is not recognised, such as 'encoder.layer.*'.",
            rich_help_panel=_TOLD,
        ),
    ] = None
    part: Annotated[
        str | None,
        Option(
            metavar="PART",
            help="The only part to look at, of a model with several: encoder, decoder, …",
            rich_help_panel=_TOLD,
        ),
    ] = None
    out: Annotated[
        Path | None,
        Option(metavar="DIR", parser=folder, help="Save the numbers and a picture there.", rich_help_panel=_RESULT),
    ] = None
    json: Annotated[bool, Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=_RESULT)] = (
        False
    )
    full: Annotated[
        bool, Option("--full", help="Print every table and note, not twenty lines.", rich_help_panel=_RESULT)
    ] = False
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Run code that comes with an hf: model.", rich_help_panel=_INPUT)
    ] = False

    @property
    def loss(self) -> Literal["no", "if causal", "where there is one", "required"]:
        """Whether a language model is to be built with its head, so that it has a loss."""
        return "no"


@dataclass(frozen=True)
class ModelOptions(WeightOptions):
    """Which model, and what it reads."""

    usual_tokens: ClassVar[int] = 128
    usual_samples: ClassVar[int] = 8

    tokens: Annotated[
        int | None,
        counted("Tokens per sequence; 128 (64 for paths) if the model takes as many.", _INPUT),
    ] = None
    samples: Annotated[
        int | None,
        counted("Sequences or images in all; fewer beyond 4096 tokens each.  [8; 2 for paths]", _INPUT),
    ] = None
    batch: Annotated[int | None, counted("Sequences at a time.  [8]", _INPUT)] = None
    text: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            parser=folder,
            help="Text to read, UTF-8; else Python's own manual.",
            rich_help_panel=_INPUT,
        ),
    ] = None
    images: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            parser=folder,
            help="Images to see (png, jpg); else random ones.",
            rich_help_panel=_INPUT,
        ),
    ] = None
    token_axis: Annotated[
        int | None,
        Option(
            min=0,
            max=1,
            help="Where the tokens stand: 1 for activations (batch, n, d), 0 for (n, batch, d); else found by trying.",
            rich_help_panel=_TOLD,
        ),
    ] = None
    causal: Annotated[
        bool | None,
        Option(
            "--causal/--no-causal",
            help="Whether no token sees a later one; else known of the family, or found by trying.",
            rich_help_panel=_TOLD,
        ),
    ] = None
    mask: Annotated[
        str | None,
        Option(
            metavar="ARGUMENT",
            help="The argument of the model that is true for real tokens; ~ARGUMENT if it is true for padding.",
            rich_help_panel=_TOLD,
        ),
    ] = None

    @property
    def hints(self) -> Hints:
        """What the user says of the model, in the words of `probe` and `apply`."""
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
        Literal["value-output", "query-key"],
        Option(help="Which product of weights: W_V W_O, or W_Q W_K\u1d40.", rich_help_panel=_PROBE),
    ] = "value-output"
    fold_norm: Annotated[
        bool, Option("--fold-norm", help="With the norm before attention (pre-norm models).", rich_help_panel=_PROBE)
    ] = False
    heads_only: Annotated[
        bool,
        Option("--heads-only", help="Leave out the whole block, which takes most of the time.", rich_help_panel=_PROBE),
    ] = False


@dataclass(frozen=True)
class ProbeOptions(ModelOptions):
    """What a user asks of `depthscope probe`."""

    measures: Annotated[
        str,
        Option(
            metavar="NAMES",
            help="verdict (what the verdict asks for), default (fewer), spectral, all, or names separated by commas.",
            rich_help_panel=_PROBE,
        ),
    ] = "verdict"
    stations: Annotated[
        str,
        Option(
            metavar="NAMES",
            help="output, trunk, all, or names separated by commas (output is added).",
            rich_help_panel=_PROBE,
        ),
    ] = "trunk,attention_input"
    exclude_tokens: Annotated[
        str | None,
        Option(metavar="TOKENS", help="Tokens to leave out: outliers, or indices such as 0,1.", rich_help_panel=_PROBE),
    ] = None
    window: Annotated[
        int | None,
        counted(
            "Measure windows of so many tokens, not whole sequences (without attention).", _PROBE, metavar="TOKENS"
        ),
    ] = None
    without: Annotated[
        str | None,
        Option(
            metavar="PARTS",
            help="Leave parts out of every block: skips, ffn, norms, or attention_skip, ffn_skip, "
            "cross_attention_skip, ffn_step, ffn_linears; separated by commas.",
            rich_help_panel=_PROBE,
        ),
    ] = None
    skip_loss: Annotated[
        bool, Option("--skip-loss", help="Also the loss without each block (language models).", rich_help_panel=_PROBE)
    ] = False
    skip_run: Annotated[int, counted("With --skip-loss: how many blocks in a row to skip.", _PROBE)] = 1
    gradients: Annotated[bool, Option("--gradients", help="Also gradient norms.", rich_help_panel=_PROBE)] = False
    depth_use: Annotated[
        bool, Option("--depth-use", help="Also which blocks matter, as `depth` measures it.", rich_help_panel=_PROBE)
    ] = False
    estimate: Annotated[
        bool,
        Option(
            "--estimate",
            help="Estimate the remedy of a collapsed model from its profile instead of measuring it: faster.",
            rich_help_panel=_PROBE,
        ),
    ] = False
    fail_on: Annotated[
        list[str] | None,
        Option(
            metavar="CONDITION",
            help='Exit with code 3 if it holds: "token_similarity>0.95" at the last block, or "… at block 12", '
            '"… in any block". Can be repeated.',
            rich_help_panel=_RESULT,
        ),
    ] = None

    @property
    def loss(self) -> Literal["no", "if causal", "where there is one", "required"]:
        """Skipping blocks changes a loss; the use of depth can do without."""
        return "required" if self.skip_loss else "where there is one" if self.depth_use else "no"


@dataclass(frozen=True)
class FixOptions(ModelOptions):
    """What a user asks of `depthscope fix`."""

    tau: Annotated[
        str, Option(metavar="TAU", help="A number in [0, 1], or recommended: measured.", rich_help_panel=_REMEDY)
    ] = "recommended"
    at: Annotated[
        Literal["input", "after_attention", "ffn_input", "output"],
        Option(help="Station of the trunk where the mean is taken out.", rich_help_panel=_REMEDY),
    ] = "output"
    mixing: Annotated[
        Literal["auto", "full", "prefix", "ema"],
        Option(help="Which mean; auto: full, or prefix in causal models.", rich_help_panel=_REMEDY),
    ] = "auto"
    level: Annotated[
        float | None,
        Option(
            help="Similarity that the recommended τ is to hold.  [that at the entrance, 0.1 to 0.5]",
            rich_help_panel=_REMEDY,
        ),
    ] = None
    alpha: Annotated[
        float | None,
        Option(help="Weight of both branches; else 1, or what the recommendation says.", rich_help_panel=_REMEDY),
    ] = None

    @property
    def loss(self) -> Literal["no", "if causal", "where there is one", "required"]:
        """Shown before and after, where there is one."""
        return "if causal"


@dataclass(frozen=True)
class PathsOptions(ModelOptions):
    """What a user asks of `depthscope paths`, whose work grows with the square of the blocks: half a minute for 30."""

    usual_tokens: ClassVar[int] = 64
    usual_samples: ClassVar[int] = 2

    by_head: Annotated[
        bool, Option("--by-head", help="Also which heads carry the paths of each length.", rich_help_panel=_PROBE)
    ] = False
    with_loss: Annotated[
        bool,
        Option(
            "--loss",
            help="Also the change of the loss when paths of a length are left out (language models).",
            rich_help_panel=_PROBE,
        ),
    ] = False

    @property
    def loss(self) -> Literal["no", "if causal", "where there is one", "required"]:
        """Leaving out paths changes a loss."""
        return "required" if self.with_loss else "no"


@dataclass(frozen=True)
class DepthOptions(ModelOptions):
    """What a user asks of `depthscope depth`."""

    quick: Annotated[
        bool,
        Option(
            "--quick", help="One pass alone: no logit lens, no skipped blocks, no linear maps.", rich_help_panel=_PROBE
        ),
    ] = False
    skips: Annotated[
        bool,
        Option(
            "--skips/--no-skips",
            help="What becomes of later blocks, output and loss without each block: a pass per block.",
            rich_help_panel=_PROBE,
        ),
    ] = True
    linear: Annotated[
        bool | None,
        Option(
            "--linear/--no-linear",
            help="Each block as a linear map, fitted on one half of the text; else if the text is long enough.",
            rich_help_panel=_PROBE,
        ),
    ] = None
    ridge: Annotated[
        float, Option(min=0.0, help="Added to the correlations of features for linear maps.", rich_help_panel=_PROBE)
    ] = 0.0

    @property
    def loss(self) -> Literal["no", "if causal", "where there is one", "required"]:
        """The lens reads the head, and skipping changes a loss."""
        return "where there is one"


def as_command(body: Callable[[Any], None]) -> Callable[..., None]:
    """A function for typer whose parameters are the fields of the options that `body` takes.

    Ctrl-C or SIGTERM ends it when it has shown and saved what was finished by then.
    """
    options = get_type_hints(body)["options"]

    def command(**values: Any) -> None:
        completion.refuse_a_typo(values["model"])
        with ending_in_order():
            body(options(**values))

    hints = get_type_hints(options, include_extras=True)
    parameters = [
        parameter.replace(annotation=hints[name]) for name, parameter in inspect.signature(options).parameters.items()
    ]
    command.__name__, command.__doc__ = body.__name__, body.__doc__
    command.__annotations__ = hints
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def split_names(value: str) -> list[str]:
    """Names separated by commas."""
    return [name.strip() for name in value.split(",") if name.strip()]


def _some_names(option: str, value: str) -> list[str]:
    if not (names := split_names(value)):
        raise ValueError(f"expected {option} with names separated by commas, got {value!r}")
    return names


def chosen_measures(options: ProbeOptions) -> str | list[str]:
    """A group by its name, or a list; `spectral` comes on top of what the verdict asks for."""
    names = _some_names("--measures", options.measures)
    if names == ["spectral"]:
        return ["verdict", "spectral"]
    return names[0] if len(names) == 1 else names


def chosen_stations(options: ProbeOptions) -> str | list[str]:
    """A group by its name, or a list; `output`, which every summary reads, is always there."""
    names = _some_names("--stations", options.stations)
    if len(names) == 1 and names[0] in ("output", "trunk", "all"):
        return names[0]
    return list(dict.fromkeys([*names, "output"]))


def excluded_tokens(options: ProbeOptions) -> Literal["outliers"] | list[int] | None:
    """`outliers`, or token indices."""
    if options.exclude_tokens is None:
        return None
    if options.exclude_tokens == "outliers":
        return "outliers"
    try:
        indices = [int(index) for index in split_names(options.exclude_tokens)]
        if not indices:
            raise ValueError
        return indices
    except ValueError:
        raise ValueError(
            f"expected --exclude-tokens outliers, or indices such as 0,1, got {options.exclude_tokens!r}"
        ) from None


def left_out_parts(options: ProbeOptions) -> tuple[str, ...]:
    """What `--without` leaves out of every block; a name that does not exist is refused."""
    from depthscope.hooks.ablation import choose_parts

    return () if options.without is None else choose_parts(options.without)
