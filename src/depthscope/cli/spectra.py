"""`depthscope spectra MODEL`: what the value weights do to tokens, block by block, without running the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthscope.cli.options import SpectraOptions
from depthscope.cli.reporting import call
from depthscope.cli.running import Finished, as_command, show_progress
from depthscope.cli.values import expanded
from depthscope.files import write_whole
from depthscope.interruption import notes as of_interruption

if TYPE_CHECKING:
    from depthscope.value_spectra import Spectra

_PLAIN = {"product": "value-output", "fold_norm": False, "whole": True}
_SHOWN = ("negative_share", "spectral_radius", "asymmetry", "mimetic_score")


@as_command
def spectra(options: SpectraOptions) -> Finished:
    """Show the eigenvalues of W_V W_O in every block: do the weights push tokens apart or together? Runs no model."""
    found = _read(options)
    return Finished(
        document=lambda: as_json(found),
        show=lambda: _show(found, full=options.full),
        save=lambda folder: _save(found, folder),
        python=call("spectra", "model", _asked(options), _PLAIN),
    )


def as_json(found: Spectra) -> dict[str, Any]:
    """What `--json` prints: the metadata, a record per block and head, and the eigenvalues as [real, imag]."""
    keys = ["block", "head"]
    values = {key: group[["real", "imag"]].to_numpy().tolist() for key, group in found.frame.groupby(keys, sort=False)}
    records = found.summary.to_dict("records")
    for record in records:
        record["eigenvalues"] = values[record["block"], record["head"]]
    return {"metadata": found.metadata, "blocks": found.depth, "spectra": records}


def _read(options: SpectraOptions) -> Spectra:
    """From disk where there are safetensors; else the model is loaded."""
    from depthscope import value_spectra
    from depthscope.cli.models import load_model
    from depthscope.value_spectra.from_disk import is_on_disk

    asked = _asked(options)
    with show_progress(not options.json) as progress:
        progress("reading", None)
        place = expanded(options.model.removeprefix("hf:"))
        if options.model.startswith("hf:") and place.is_dir() and is_on_disk(place):
            _check_configuration(place, options)
            tick = progress("eigenvalues", None)
            found = value_spectra.spectra(place, progress=tick, trust_remote_code=options.trust_remote_code, **asked)
        else:
            loaded = load_model(options)
            tick = progress("eigenvalues", None)
            found = value_spectra.spectra(loaded.model, progress=tick, **asked)
            found.metadata["notes"] += loaded.notes
    found.metadata["model"] = options.model
    found.metadata["notes"] += of_interruption()
    return found


def _asked(options: SpectraOptions) -> dict[str, Any]:
    return {
        "product": options.product,
        "fold_norm": options.fold_norm,
        "whole": not options.heads_only,
        "blocks": options.blocks,
        "part": options.part,
    }


def _check_configuration(place: Path, options: SpectraOptions) -> None:
    """A depth that no machine holds is refused before the model is built, if only without its weights."""
    from depthscope.cli.models import quiet_transformers, refuse_a_shape
    from depthscope.cli.sizes import require_depth

    refuse_a_shape(options)
    transformers = quiet_transformers()
    known = {"trust_remote_code": options.trust_remote_code, "local_files_only": True}
    require_depth(transformers.PretrainedConfig.get_config_dict(str(place), **known)[0], repr(options.model))


def _show(found: Spectra, *, full: bool) -> None:
    from depthscope.cli.display import show, show_table
    from depthscope.diagnosis.summary import of_spectra

    show(of_spectra(found), full=full, rest="every block")
    if not full:
        return
    rows = []
    for block, row in found.by_block.iterrows():
        heads = found.summary[(found.summary["block"] == block) & (found.summary["head"] >= 0)]["negative_share"]
        spread = f"{heads.min():.2f} to {heads.max():.2f}" if len(heads) else ""
        share, radius, skew, cosine = (row[name] for name in _SHOWN)
        rows.append([str(block), f"{share:.2f}", f"{radius:.3g}", f"{skew:.2f}", f"{cosine:+.3f}", spread])
    names = ("block", "negative\nshare", "largest\n|λ|", "asymmetry", "cosine\nwith I", "heads:\nnegative share")
    show_table(names, rows)


def _save(found: Spectra, folder: Path) -> None:
    """The numbers first: a picture that fails must not cost them."""
    found.save(folder)
    write_whole(folder / "spectra.png", lambda path: found.plot().savefig(path, dpi=160))
