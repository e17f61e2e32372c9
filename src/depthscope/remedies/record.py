"""Remedies in a configuration: a Hugging Face model that is saved says which it had, and `restore` puts them back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from depthscope.naming import did_you_mean
from depthscope.passes.hooks import hooks_in, take_down
from depthscope.remedies.remedy import REMEDIES, Remedy

FIELD = "depthscope_remedies"


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
    kind = REMEDIES[record["remedy"]]
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    given = {name: item for name, item in record.items() if name != "remedy"}
    for name in given:
        if name not in known:
            meant = did_you_mean(name, known)
            raise ValueError(f"{kind.name} has no option {name!r}: {meant}expected some of {', '.join(known)}")
    try:
        return kind(**{name: _value(item, kind) for name, item in given.items()})
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected a record of {kind.name}, got {dict(record)}: {error}") from None


def _value(item: Any, kind: type[Remedy]) -> Any:
    if isinstance(item, Mapping):
        values = {value.__name__: value for value in kind.option_types}
        return values[item["kind"]](**{name: value for name, value in item.items() if name != "kind"})
    return tuple(item) if isinstance(item, list) else item


def recorded(model: nn.Module) -> list[Remedy]:
    """The remedies in the model's configuration."""
    return [from_dict(record) for record in getattr(_config(model), FIELD, [])]


def keep_record(model: nn.Module, remedies: list[Remedy]) -> None:
    """Writes them into the model's configuration, if it has one that `save_pretrained` saves."""
    config = _config(model)
    if config is not None:
        setattr(config, FIELD, [*getattr(config, FIELD, []), *(to_dict(remedy) for remedy in remedies)])


def forget(model: nn.Module) -> None:
    """Takes the record out of the configuration."""
    config = _config(model)
    if config is not None and hasattr(config, FIELD):
        delattr(config, FIELD)


def restore(model: nn.Module, weights: Mapping[str, Tensor] | str | Path | None = None) -> nn.Module:
    """Puts the remedies back that the configuration of a loaded model records.

    `weights`, the saved state_dict or the folder or file (safetensors) that holds it, gives back what a learnable τ
    had reached: `from_pretrained` does not know these keys and leaves them out.
    """
    from depthscope.remedies.application import apply

    remedies = recorded(model)
    if not remedies:
        raise ValueError(f"the configuration of this {type(model).__name__} records no remedies")
    if any(True for _ in hooks_in(model)):
        raise ValueError("the model has its remedies already")
    forget(model)
    try:
        apply(model, *remedies)
        _load_learned(model, weights)
    except BaseException:
        take_down(model)
        forget(model)
        keep_record(model, remedies)
        raise
    return model


def _load_learned(model: nn.Module, weights: Mapping[str, Tensor] | str | Path | None) -> None:
    ours = {id(parameter) for _, hook in hooks_in(model) for parameter in hook.parameters().values()}
    learned = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in ours}
    if not learned:
        return
    if weights is None:
        raise ValueError("the recorded remedies have learned: pass restore(model, the folder it was saved in)")
    saved = weights if isinstance(weights, Mapping) else _read(Path(weights), learned)
    for name, parameter in learned.items():
        if name not in saved:
            raise ValueError(f"expected {name!r} among the saved weights, got none")
        with torch.no_grad():
            parameter.copy_(saved[name])


def _read(path: Path, names: Mapping[str, Any]) -> dict[str, Tensor]:
    from safetensors import safe_open

    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise ValueError(f"expected a safetensors file, or a folder with one, got {str(path)!r}")
    found: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys() if name in names}  # noqa: SIM118
    return found


def _config(model: nn.Module) -> Any:
    """The configuration that `save_pretrained` would write; also behind DistributedDataParallel."""
    inner = getattr(model, "module", model)
    return getattr(inner, "config", None) if hasattr(inner, "save_pretrained") else None
