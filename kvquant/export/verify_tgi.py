"""What Text Generation Inference 3.3 would do with a directory."""

from __future__ import annotations

from .attention_names import AttentionModule
from .served_files import SINGLE_FILE, Reading, ServedDirectory
from .served_model import ServedModel
from .simulated_loader import Absent, Loader, load
from .verify_files import file_findings, repeated
from .verify_report import Finding, LayerVerdict, examples, ranges, some
from .verify_scales import scale_findings

ENGINE = "TGI"


def check_tgi(
    served: ServedDirectory, model: ServedModel
) -> tuple[list[LayerVerdict], list[Finding]]:
    """The scales that TGI would serve each layer with, and what is wrong.

    It takes them by their names in the checkpoint, whatever the config declares.
    """
    files = served.read_by(Reading.EVERY)
    loaded = load(_LOADER, files, model.modules, model.geometry)
    findings = [
        *file_findings(served, ENGINE, Reading.EVERY),
        *_twice(served),
        *scale_findings(loaded),
        *_latent(model),
        Finding(
            "launch with --kv-cache-dtype fp8_e4m3fn and flashinfer; fp8_e5m2 uses no scales",
            serious=False,
        ),
    ]
    return list(loaded.verdicts()), findings


def _latent(model: ServedModel) -> list[Finding]:
    layers = model.latent_layers
    if not layers:
        return []
    return [
        Finding(
            f"layers {ranges(layers)} keep a latent (MLA), for which {ENGINE} is not known to load "
            f"scales",
            "serve this model with vLLM",
            serious=False,
        )
    ]


def _twice(served: ServedDirectory) -> list[Finding]:
    """Tensors in several files, at which TGI stops; whole second copies are said elsewhere."""
    files = [
        file
        for name, file in served.files.items()
        if not name.startswith("consolidated")
        and not (name == SINGLE_FILE and served.weight_map is not None)
    ]
    found = repeated(files)
    if not found:
        return []
    name, places = next(iter(found.items()))
    return [
        Finding(
            f"in more than one file: {some(len(found), 'tensor')} ({examples(list(found))}), "
            f"{name} in {' and '.join(places)}; {ENGINE} stops there",
            "remove the copies",
        )
    ]


def _names(module: AttentionModule) -> tuple[str, str]:
    return f"{module.path}.k_scale", f"{module.path}.v_scale"


_LOADER = Loader(
    ENGINE,
    lambda name: name,
    _names,
    _names,
    Absent.BOTH,
    fused=lambda module: f"{module.path}.kv_scale",
)
