"""`depthscope spectra MODEL`: what the value weights do to tokens, block by block, without running the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from depthscope.cli.command import Finished, as_command, call, keep, show_progress
from depthscope.cli.options import SpectraOptions
from depthscope.cli.values import expanded
from depthscope.interruption import notes as of_interruption

if TYPE_CHECKING:
    from depthscope.value_spectra import Spectra


@as_command
def spectra(options: SpectraOptions) -> Finished:
    """Show the eigenvalues of W_V W_O in every block: do the weights push tokens apart or together? Runs no model."""
    from depthscope.diagnosis.summary import of_spectra

    asked = {name: getattr(options, name) for name in ("product", "blocks", "part")}
    asked["whole"] = not options.heads_only
    found = _read(options, asked)
    blocks = found.by_block[["negative_share", "spectral_radius", "asymmetry", "mimetic_score"]]
    return Finished(
        document=as_json(found),
        summary=of_spectra(found),
        save=lambda folder: keep(found, folder, "spectra"),
        python=call("spectra", "model", asked),
        tables={"every block": blocks},
    )


def as_json(found: Spectra) -> dict[str, Any]:
    """What `--json` prints: the metadata, a record per block and head, and the eigenvalues as [real, imag]."""
    keys = ["block", "head"]
    values = {key: group[["real", "imag"]].to_numpy().tolist() for key, group in found.frame.groupby(keys, sort=False)}
    records = found.summary.to_dict("records")
    for record in records:
        record["eigenvalues"] = values[record["block"], record["head"]]
    return {"metadata": found.metadata, "blocks": found.depth, "spectra": records}


def _read(options: SpectraOptions, asked: dict[str, Any]) -> Spectra:
    """From disk where there are safetensors; else the model is loaded."""
    from depthscope import value_spectra
    from depthscope.cli.models import load_model, refuse_a_shape, require_depth, silent_transformers
    from depthscope.value_spectra.from_disk import is_on_disk

    with show_progress(not options.json) as progress:
        progress("reading", None)
        place = expanded(options.model.removeprefix("hf:"))
        trust: Any = {"trust_remote_code": options.trust_remote_code}
        if options.model.startswith("hf:") and place.is_dir() and is_on_disk(place):
            refuse_a_shape(options)
            described = silent_transformers().PretrainedConfig.get_config_dict(
                str(place), local_files_only=True, **trust
            )
            require_depth(described[0], repr(options.model))  # what no machine holds is refused before it is built
            found = value_spectra.spectra(place, progress=progress("eigenvalues", None), **trust, **asked)
        else:
            loaded = load_model(options)
            found = value_spectra.spectra(loaded.model, progress=progress("eigenvalues", None), **asked)
            found.metadata["notes"] += loaded.notes
    found.metadata["model"] = options.model
    found.metadata["notes"] += of_interruption()
    return found
