"""Remedies written down: as JSON, as the Python that puts them in, and in a configuration: a Hugging Face model that is
saved says which it had, and `restore` puts them back."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from depthscope.hooks.staying import hooks_in, take_down
from depthscope.naming import did_you_mean
from depthscope.remedies.remedy import REMEDIES, Remedy

FIELD = "depthscope_remedies"
OPTIONS = "told"  # the key beside a remedy with the options of its `apply`, so that `restore` does the same
DROPPED = ("attn-scale", "feat-scale", "centred-attention", "neutreno", "value-residual")  # that earlier versions had


def to_dict(remedy: Remedy) -> dict[str, Any]:
    """What JSON keeps of a remedy: its name and the fields that are not at their default."""
    return {"remedy": remedy.name} | _changed(remedy)


def _changed(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in fields(value):
        item = getattr(value, field.name)
        if item != field.default:
            if is_dataclass(item):
                item = {"kind": type(item).__name__} | _changed(item)
            found[field.name] = list(item) if isinstance(item, tuple) else item
    return found


def from_dict(record: Mapping[str, Any]) -> Remedy:
    """The remedy that `to_dict` wrote."""
    if "remedy" not in record:
        raise ValueError(f"expected a record of {' or '.join(REMEDIES)}, got {dict(record)}")
    if (name := record["remedy"]) in DROPPED and name not in REMEDIES:
        raise ValueError(f"depthscope has dropped the remedy {name!r}: use the version that the record was made with")
    kind = REMEDIES[name]
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    options = {name: item for name, item in record.items() if name != "remedy"}
    for name in options:
        if name not in known:
            meant = did_you_mean(name, known)
            raise ValueError(f"{kind.name} has no option {name!r}: {meant}expected some of {', '.join(known)}")
    try:
        return kind(**{name: _value(item, kind) for name, item in options.items()})
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected a record of {kind.name}, got {dict(record)}: {error}") from None


def _value(item: Any, kind: type[Remedy]) -> Any:
    if isinstance(item, Mapping):
        values = {value.__name__: value for value in kind.option_types}
        return values[item["kind"]](**{name: _value(value, kind) for name, value in item.items() if name != "kind"})
    for number in item if isinstance(item, list | tuple) else (item,):
        most = 2**63 - 1 if isinstance(number, int) else torch.finfo(torch.float32).max  # what torch can compute with
        if isinstance(number, int | float) and most < abs(number) != math.inf:  # the remedy itself refuses infinity
            raise ValueError(f"expected numbers of at most {most:.3g} as options of {kind.name}, got {number}")
    return tuple(item) if isinstance(item, list) else item


# --- as Python -------------------------------------------------------------------------------------


def expression(remedy: Remedy) -> str:
    """`DeEscalate(tau=0.4, at="output")`: the options that are not at their default, and those without one."""
    everybody = {field.name for field in fields(Remedy)}
    own_first = sorted(fields(remedy), key=lambda field: field.name in everybody)
    options = [
        f"{field.name}={_literal(getattr(remedy, field.name))}"
        for field in own_first
        if field.default is MISSING or getattr(remedy, field.name) != field.default or field.name in remedy.always_shown
    ]
    return f"{type(remedy).__name__}({', '.join(options)})"


def call(remedies: tuple[Remedy, ...], options: Mapping[str, Any]) -> str:
    """The line that puts remedies into a model; `options` are what else `apply` is given."""
    arguments = ["model", *map(expression, remedies), *(f"{name}={_literal(value)}" for name, value in options.items())]
    return f"depthscope.apply({', '.join(arguments)})"


def imports(remedies: tuple[Remedy, ...]) -> list[str]:
    """The lines that import the remedies, and what their options hold."""
    sources: dict[str, set[str]] = {}
    for kind in (kind for remedy in remedies for kind in _types_in(remedy)):
        package = "depthscope.remedies" if kind.__module__.startswith("depthscope.") else kind.__module__
        sources.setdefault(package, set()).add(kind.__name__)
    return [f"from {package} import {', '.join(sorted(names))}" for package, names in sources.items()]


def _types_in(value: Any) -> Iterator[type]:
    yield type(value)
    for field in fields(value):
        if is_dataclass(item := getattr(value, field.name)):
            yield from _types_in(item)


def _literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


# --- in a model's configuration --------------------------------------------------------------------


def recorded(model: nn.Module) -> list[tuple[Remedy, Mapping[str, Any]]]:
    """The remedies in the model's configuration, with the options that `apply` was given (blocks, causal, …)."""
    records = ((dict(record), record.get(OPTIONS, {})) for record in records_of(model))
    return [(from_dict({name: own[name] for name in own if name != OPTIONS}), options) for own, options in records]


def keep_record(model: nn.Module, remedies: Sequence[Remedy], options: Mapping[str, Any]) -> None:
    """Writes them into the model's configuration, if it has one that `save_pretrained` saves."""
    hints = {OPTIONS: dict(options)} if options else {}
    set_records(model, [*records_of(model), *(to_dict(remedy) | hints for remedy in remedies)])


def records_of(model: nn.Module) -> list[dict[str, Any]]:
    """What the configuration holds now, for `set_records`."""
    return list(getattr(_config(model), FIELD, []))


def set_records(model: nn.Module, records: Sequence[dict[str, Any]]) -> None:
    """Leaves these records in the configuration, and no others; none: also no field for them."""
    config = _config(model)
    if config is not None and records:
        setattr(config, FIELD, list(records))
    elif hasattr(config, FIELD):
        delattr(config, FIELD)


def _config(model: nn.Module) -> Any:
    """The configuration that `save_pretrained` would write; also inside DistributedDataParallel."""
    inner = getattr(model, "module", model)
    return getattr(inner, "config", None) if hasattr(inner, "save_pretrained") else None


def restore(model: nn.Module, weights: Mapping[str, Tensor] | str | Path | None = None) -> nn.Module:
    """Puts the remedies back that the configuration of a loaded model records, into the same blocks as before.

    Args:
        model: what `from_pretrained` gave.
        weights: the saved state_dict, or the folder or file (safetensors) that holds it: gives back what a learnable τ
            had reached, since `from_pretrained` does not know these keys and leaves them out.

    Returns:
        The model.

    Example:
        >>> import depthscope
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
        >>> saved = depthscope.apply(BertModel(config), depthscope.DeEscalate(0.3)).config  # goes into config.json
        >>> len(depthscope.remedies.applied(depthscope.restore(BertModel(saved))))
        2
    """
    from depthscope.remedies.application import apply

    found, before = recorded(model), records_of(model)
    if not found:
        why = f": {ADAPTERS_ALONE}; apply them again" if has_adapters(model) else ""
        raise ValueError(f"the configuration of this {type(model).__name__} records no remedies{why}")
    if any(True for _ in hooks_in(model)):
        raise ValueError("the model has its remedies already")
    set_records(model, [])
    try:
        for options, group in groupby(found, key=lambda item: item[1]):
            apply(model, *(remedy for remedy, _ in group), **options)
        _load_learned(model, weights)
    except BaseException:
        take_down(model)
        set_records(model, before)
        raise
    return model


def _load_learned(model: nn.Module, weights: Mapping[str, Tensor] | str | Path | None) -> None:
    ours = {id(parameter) for _, hook in hooks_in(model) for parameter in hook.parameters().values()}
    learned = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in ours}
    if not learned:
        return
    if weights is None:
        raise ValueError("the recorded remedies have learned: pass restore(model, the folder it was saved in)")
    on_disk = {name: _name_on_disk(model, name, parameter) for name, parameter in learned.items()}
    saved = weights if isinstance(weights, Mapping) else _read(Path(weights), {*on_disk, *on_disk.values()})
    for name, parameter in learned.items():
        found = saved.get(name, saved.get(on_disk[name]))
        if found is None or found.shape != parameter.shape:
            got = "none" if found is None else f"one of shape {tuple(found.shape)}"
            expected = f"{name!r} of shape {tuple(parameter.shape)}"
            raise ValueError(f"expected {expected} among the saved weights, got {got}")
        with torch.no_grad():
            parameter.copy_(found)


def _name_on_disk(model: nn.Module, name: str, parameter: Tensor) -> str:
    """What `save_pretrained` calls it: Transformers 5 writes some families, ViT's among them, under older names."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # an older version, which renames nothing
        return name
    inner: Any = getattr(model, "module", model)
    return str(next(iter(revert_weight_conversion(inner, {name: parameter}))))


def _read(path: Path, names: Collection[str]) -> dict[str, Tensor]:
    from safetensors import safe_open

    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise ValueError(f"expected a safetensors file, or a folder with one, got {str(path)!r}")
    found: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys() if name in names}  # noqa: SIM118
    return found


ADAPTERS_ALONE = "PEFT's save_pretrained writes adapters alone, and no record of remedies"


def has_adapters(model: nn.Module) -> bool:
    """Whether it has adapters of PEFT: what it saves is then not the model, and not its configuration."""
    return hasattr(getattr(model, "module", model), "peft_config")
