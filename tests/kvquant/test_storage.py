from __future__ import annotations

import json
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from kvquant import storage
from kvquant.errors import FileFormatError, FingerprintError, InputError
from kvquant.fingerprint import Fingerprint, fingerprint
from kvquant.geometry import CacheGeometry, LayerGeometry, LayerKind
from kvquant.provenance import Provenance
from kvquant.rotary import RotaryLayout
from kvquant.scales import KVScales, LayerScales, TensorScales
from kvquant.scheme import Granularity, QuantScheme, TensorScheme, format_names, tensor_format
from kvquant.storage import KVQuantWarning, find, kind_of, load_scales, save_scales, suffixed

GEOMETRY = CacheGeometry(
    "llama",
    (
        LayerGeometry(LayerKind.SLIDING, 2, 4, 3, window=8),
        LayerGeometry(LayerKind.LINEAR),
        LayerGeometry(LayerKind.FULL, 2, 4, 3),
    ),
    512,
)


def tensor_scales(how: TensorScheme, dim: int, seed: int, rotary: bool) -> TensorScales:
    random = torch.Generator().manual_seed(seed)
    shape = how.granularity.scale_shape(2, dim)
    ends = torch.randn((2, *shape), generator=random) * torch.rand(shape, generator=random) * 10
    mean = torch.randn(2, dim, generator=random)
    return replace(
        TensorScales.from_range(ends.amin(0), ends.amax(0), how),
        mean=mean,
        mean_unrotated=mean * 2 if rotary else None,
        rotary=RotaryLayout(0, dim, True, "even") if rotary else None,
        turned=torch.randint(2, (dim // 2,), generator=random).bool() if rotary else None,
    )


def random_scales(
    key: TensorScheme, value: TensorScheme, seed: int = 0, skip: frozenset[int] = frozenset()
) -> KVScales:
    layers = {
        index: LayerScales(
            tensor_scales(key, 4, seed * 10 + index, rotary=True),
            tensor_scales(value, 3, seed * 10 + index + 5, rotary=False),
        )
        for index in {0, 2} - skip
    }
    provenance = Provenance(
        model="modèle",
        adapters=("out/a",),
        fingerprints=(Fingerprint("w" * 64, ("a" * 64,), "t" * 64, ""),),
        corpora=({"source": "a.txt", "rows": 3},),
        tokens=100,
        longest_position=64,
        versions={"torch": "2.13"},
        command=("kvquant calibrate",),
    )
    return KVScales(GEOMETRY, QuantScheme(key, value, skip), layers, provenance, "mse")


def scheme(name: str, granularity: str = "channel", symmetric: bool = True) -> TensorScheme:
    return TensorScheme(tensor_format(name), Granularity.parse(granularity), symmetric)


SCALES = random_scales(scheme("int8", symmetric=False), scheme("fp8", "head"))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "ft-scales.safetensors"
    save_scales(SCALES, path)
    return path


# There and back


@st.composite
def scale_sets(draw: st.DrawFn) -> KVScales:
    tensor_schemes = st.builds(
        lambda name, granularity, symmetric: TensorScheme(
            tensor_format(name), granularity, symmetric or name.startswith("fp8")
        ),
        st.sampled_from(format_names()),
        st.sampled_from([g for g in Granularity if g.is_static]),
        st.booleans(),
    )
    skip = draw(st.sampled_from([frozenset[int](), frozenset({0}), frozenset({0, 2})]))
    seed = draw(st.integers(0, 1000))
    return random_scales(draw(tensor_schemes), draw(tensor_schemes), seed, skip)


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(scales=scale_sets())
def test_scales_come_back_bit_for_bit(scales: KVScales, tmp_path: Path) -> None:
    path = tmp_path / "scales.safetensors"
    save_scales(scales, path)
    assert load_scales(path) == scales


def test_the_file_is_plain_safetensors_with_a_json_header(saved: Path) -> None:
    """G23: without ``format: pt`` older readers fail."""
    with safe_open(saved, framework="pt") as file:
        metadata = file.metadata()
        scale = file.get_tensor("layers.2.key.scale")
        turned = file.get_tensor("layers.2.key.turned")
        names = set(file.keys())
    assert metadata["format"] == "pt"
    header = json.loads(metadata["kvquant"])
    assert (header["version"], header["kind"]) == (2, "scales")
    assert header["layers"] == [0, 2]
    assert header["provenance"]["model"] == "modèle"
    assert torch.equal(scale, SCALES.layers[2].key.scale)
    assert turned.dtype == torch.uint8
    assert torch.equal(turned.bool(), SCALES.layers[2].key.turned)
    assert "layers.2.value.turned" not in names


def test_tensors_may_share_memory_and_lie_across_it(tmp_path: Path) -> None:
    """G14: an engine that takes one scale makes keys and values the very same tensor."""
    how = scheme("fp8", "tensor")
    one = TensorScales(torch.full((1, 1), 0.25))
    across = TensorScales(torch.full((1, 1), 0.25), mean=torch.arange(8.0).view(4, 2).T)
    view = TensorScales(torch.arange(1.0, 9.0)[3:4].view(1, 1))
    layers = {0: LayerScales(one, one), 2: LayerScales(across, view)}
    shared = KVScales(GEOMETRY, QuantScheme(how, how), layers)
    save_scales(shared, tmp_path / "shared.safetensors")
    assert load_scales(tmp_path / "shared.safetensors") == shared


def test_what_is_loaded_can_be_saved_over_its_own_file(saved: Path) -> None:
    save_scales(load_scales(saved), saved)
    assert load_scales(saved) == SCALES


def test_loaded_scales_do_not_depend_on_the_file_any_more(saved: Path) -> None:
    loaded = load_scales(saved)
    with saved.open("r+b") as stream:
        stream.write(bytes(saved.stat().st_size))
    assert loaded == SCALES


def test_a_file_is_found_with_and_without_its_suffix(saved: Path) -> None:
    bare = saved.with_suffix("")
    assert find(bare, ".safetensors") == saved
    assert find(str(saved), ".safetensors") == saved
    assert load_scales(bare) == load_scales(str(bare)) == SCALES
    renamed = saved.rename(bare)
    assert load_scales(renamed) == SCALES
    assert find("v1.5", ".stats") == Path("v1.5.stats")


def test_its_kind_can_be_asked(saved: Path, tmp_path: Path) -> None:
    assert kind_of(saved) == "scales"
    storage.write(tmp_path / "s", "stats", {}, {})
    assert kind_of(tmp_path / "s") == "stats"
    save_file({"a": torch.zeros(1)}, tmp_path / "foreign")
    (tmp_path / "text").write_text("hello")
    others = ("foreign", "text", "missing", ".")
    assert [kind_of(tmp_path / name) for name in others] == [None] * 4


# Writing


def content_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_write_beyond_the_space_there_is_leaves_the_old_file(saved: Path) -> None:
    """A file size limit ends the write half-way, as a full disk does."""
    before = content_of(saved.parent)
    code = (
        "import sys; from pathlib import Path; from kvquant import errors, storage\n"
        "try: storage.write_atomically(Path(sys.argv[1]), bytes(1_000_000))\n"
        "except errors.InputError as error: sys.exit(str(error))"
    )

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    command = [sys.executable, "-c", code, str(saved)]
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"cannot write {saved} (1.0 MB): File too large\n"
    assert content_of(saved.parent) == before


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_an_interrupted_write_leaves_the_old_file(
    saved: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    before = content_of(saved.parent)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    owner: Any = os if moment == "fsync" else Path
    monkeypatch.setattr(owner, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_scales(random_scales(scheme("int4"), scheme("int4")), saved)
    monkeypatch.undo()
    assert content_of(saved.parent) == before


def test_an_interrupted_copy_to_the_cpu_leaves_the_old_file(saved: Path) -> None:
    class Interrupted(dict[str, torch.Tensor]):
        def items(self) -> Any:
            raise KeyboardInterrupt

    before = content_of(saved.parent)
    with pytest.raises(KeyboardInterrupt):
        storage.write(saved, "scales", Interrupted(), {})
    assert content_of(saved.parent) == before


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_the_umask_says_who_may_read(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        storage.write_atomically(tmp_path / "file", b"content")
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_directories_on_the_way_are_made(tmp_path: Path) -> None:
    storage.write_atomically(tmp_path / "a" / "b" / "file", b"content")
    assert (tmp_path / "a" / "b" / "file").read_bytes() == b"content"


@pytest.mark.parametrize("there_already", [True, False])
def test_a_symbolic_link_stays_one_and_its_target_is_written(
    tmp_path: Path, there_already: bool
) -> None:
    target, link = tmp_path / "disk" / "target", tmp_path / "link"
    target.parent.mkdir()
    if there_already:
        target.write_bytes(b"old")
    link.symlink_to(Path("disk", "target"))
    storage.write_atomically(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert [path.name for path in tmp_path.rglob("*")].count("target") == 1


def blocked_places(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    (tmp_path / "directory").mkdir()
    yield tmp_path / "directory", "directory"
    (tmp_path / "file").write_bytes(b"")
    yield tmp_path / "file" / "scales", "file is no directory"
    os.mkfifo(tmp_path / "pipe")
    yield tmp_path / "pipe", "pipe"
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    yield tmp_path / "loop" / "x", ""
    yield tmp_path / ("n" * 300), "name too long"


def test_places_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    for place, why in blocked_places(tmp_path):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(InputError) as caught:
            storage.write_atomically(place, b"content")
        message = str(caught.value)
        assert message.startswith(f"cannot write {place}")
        assert why in message
        assert "\n" not in message
        assert sorted(tmp_path.rglob("*")) == before


def test_places_can_be_looked_at_before_long_work(saved: Path, tmp_path: Path) -> None:
    before = content_of(tmp_path)
    for place in (saved, tmp_path / "new"):
        storage.check_writable(place)
    assert content_of(tmp_path) == before
    for place, why in blocked_places(tmp_path):
        with pytest.raises(InputError, match=why):
            storage.check_writable(place)


# Reading what is no good


def refusal(path: Path) -> str:
    with pytest.raises(FileFormatError) as caught:
        load_scales(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("percent", range(0, 100, 10))
def test_a_file_cut_short_is_refused(saved: Path, percent: int) -> None:
    content = saved.read_bytes()
    saved.write_bytes(content[: len(content) * percent // 100])
    assert "cut short" in refusal(saved)


def test_a_file_that_lacks_its_last_byte_is_refused(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes()[:-1])
    assert "cut short" in refusal(saved)


@pytest.mark.parametrize("content", [b"", b"hello", bytes(1000), b"\xff" * 1000, b"GGUF" * 10])
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    assert "no safetensors file" in refusal(path)


def test_a_place_without_a_file_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "missing.safetensors")
    (tmp_path / "d.safetensors").mkdir()
    assert "is a directory" in refusal(tmp_path / "d.safetensors")
    os.mkfifo(tmp_path / "p.safetensors")
    assert "is no file" in refusal(tmp_path / "p.safetensors")
    long = tmp_path / ("n" * 300 + ".safetensors")
    assert "does not exist" in refusal(long)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_someone_elses_safetensors_are_refused(
    tmp_path: Path, metadata: dict[str, str] | None
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1)}, path, metadata)
    assert "not one of kvquant's" in refusal(path)


def rewritten(
    path: Path,
    header: Callable[[dict[str, Any]], Any] = lambda header: header,
    tensors: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None,
) -> Path:
    """`path` with its header or its tensors changed."""
    with safe_open(path, framework="pt") as file:
        found = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    changed = header(json.loads(metadata["kvquant"]))
    metadata["kvquant"] = changed if isinstance(changed, str) else json.dumps(changed)
    tensors(found)
    save_file(found, path, metadata)
    return path


def test_a_newer_version_says_to_upgrade(saved: Path) -> None:
    message = refusal(rewritten(saved, lambda header: {**header, "version": 3}))
    assert "format version 3, this kvquant reads up to 2" in message
    assert "upgrade" in message


def test_a_newer_version_with_another_header_still_says_to_upgrade(saved: Path) -> None:
    assert "upgrade" in refusal(rewritten(saved, lambda _: {"version": 9, "kind": "scales"}))


def test_a_file_of_version_1_does_not_say_which_pairs_turn(saved: Path) -> None:
    def forget(tensors: dict[str, torch.Tensor]) -> None:
        for index in SCALES.layers:
            del tensors[f"layers.{index}.key.turned"]

    found = load_scales(rewritten(saved, lambda header: {**header, "version": 1}, forget))
    for index, layer in SCALES.layers.items():
        assert found.layers[index].key == replace(layer.key, turned=None)
        assert found.layers[index].value == layer.value


def test_statistics_are_no_scales(saved: Path) -> None:
    message = refusal(rewritten(saved, lambda header: {**header, "kind": "stats"}))
    assert message.endswith("is a stats file, a scales file is needed")


@pytest.mark.parametrize(
    "header", ["not json", "", "[]", "null", "3", "{}", '{"version": "x", "kind": "scales"}']
)
def test_a_header_that_is_none_is_refused(saved: Path, header: str) -> None:
    assert "damaged" in refusal(rewritten(saved, lambda _: header))


HEADER = ["version", "kind", "scheme", "geometry", "provenance", "method", "layers", "rotary"]


def test_these_are_all_header_fields(saved: Path) -> None:
    with safe_open(saved, framework="pt") as file:
        assert sorted(json.loads(file.metadata()["kvquant"])) == sorted(HEADER)


@pytest.mark.parametrize("name", HEADER)
def test_a_header_that_lacks_a_field_is_refused(saved: Path, name: str) -> None:
    damaged = rewritten(saved, lambda header: {k: v for k, v in header.items() if k != name})
    assert name in refusal(damaged)


@pytest.mark.parametrize("value", [None, 7, "x", [], {"x": 1}, [None]])
@pytest.mark.parametrize("name", ["scheme", "geometry", "provenance", "layers", "rotary"])
def test_a_header_field_of_the_wrong_kind_is_refused(saved: Path, name: str, value: Any) -> None:
    if (name, value) == ("rotary", {"x": 1}):
        value = {"layers.0.key": {"start": 0}}
    assert "damaged" in refusal(rewritten(saved, lambda header: {**header, name: value}))


def test_a_header_with_an_impossible_scheme_is_refused(saved: Path) -> None:
    def change(header: dict[str, Any]) -> dict[str, Any]:
        header["scheme"]["value"]["format"] = "nvfp4"
        return header

    message = refusal(rewritten(saved, change))
    assert "unknown format 'nvfp4'" in message


@pytest.mark.parametrize("name", ["layers.0.key.scale", "layers.2.value.scale"])
def test_a_missing_scale_is_named(saved: Path, name: str) -> None:
    assert name in refusal(rewritten(saved, tensors=lambda tensors: tensors.__delitem__(name)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layers.0.key.scale", torch.zeros(2, 4)),
        ("layers.0.key.scale", torch.full((2, 4), float("nan"))),
        ("layers.0.key.scale", torch.ones(2, 5)),
        ("layers.0.key.scale", torch.ones(2, 4).half()),
        ("layers.0.key.zero_point", torch.full((2, 4), 0.5)),
        ("layers.2.value.mean", torch.full((2, 3), float("inf"))),
        ("layers.0.key.turned", torch.ones(3, dtype=torch.uint8)),
        ("layers.2.value.turned", torch.ones(1, dtype=torch.uint8)),
    ],
)
def test_tensors_that_no_cache_could_use_are_refused(
    saved: Path, name: str, value: torch.Tensor
) -> None:
    damaged = rewritten(saved, tensors=lambda tensors: tensors.update({name: value}))
    assert name.rpartition(".")[0].replace("layers.", "layer ").split(".")[0] in refusal(damaged)


@pytest.mark.parametrize("value", [torch.tensor([0, 2], dtype=torch.uint8), torch.ones(2)], ids=str)
def test_turned_pairs_are_stored_as_bytes_of_0_and_1(saved: Path, value: torch.Tensor) -> None:
    name = "layers.0.key.turned"
    damaged = rewritten(saved, tensors=lambda tensors: tensors.update({name: value}))
    assert refusal(damaged).endswith(f"{name} must be bytes of 0 and 1")


# Whose scales they are


def scales_of(model: Any, tokenizer: Any = None) -> KVScales:
    how = scheme("fp8", "tensor")
    geometry = CacheGeometry.from_config(model.config)
    one = TensorScales(torch.ones(1, 1))
    layers = {index: LayerScales(one, one) for index in geometry.attention_layers}
    origin = Provenance(fingerprints=(fingerprint(model, tokenizer),))
    return KVScales(geometry, QuantScheme(how, how), layers, origin)


@pytest.mark.filterwarnings("error::UserWarning")
def test_scales_load_for_their_own_model(
    tmp_path: Path, tiny: Callable[..., Any], byte_tokenizer: Any
) -> None:
    model = tiny("llama")
    scales = scales_of(model, byte_tokenizer)
    save_scales(scales, tmp_path / "s")
    assert load_scales(tmp_path / "s", model, tokenizer=byte_tokenizer) == scales
    byte_tokenizer.chat_template = "{{ messages }}"
    assert load_scales(tmp_path / "s", model, tokenizer=byte_tokenizer) == scales


def test_scales_of_another_model_need_force(tmp_path: Path, tiny: Callable[..., Any]) -> None:
    model, other = tiny("llama"), tiny("llama")
    torch.nn.init.normal_(other.model.layers[1].self_attn.k_proj.weight)
    save_scales(scales_of(model), tmp_path / "s")
    with pytest.raises(FingerprintError) as caught:
        load_scales(tmp_path / "s", other)
    assert str(fingerprint(model)) in str(caught.value)
    assert str(fingerprint(other)) in str(caught.value)
    with pytest.warns(UserWarning, match="forced: the scales belong to"):
        forced = load_scales(tmp_path / "s", other, force=True)
    assert forced == scales_of(model)


def test_scales_of_another_geometry_need_force(tmp_path: Path, tiny: Callable[..., Any]) -> None:
    save_scales(scales_of(tiny("llama")), tmp_path / "s")
    with pytest.raises(FingerprintError, match="key_dim 16 in the scales, 24 in the model"):
        load_scales(tmp_path / "s", tiny("llama_wide"))
    with pytest.raises(FingerprintError, match="of another cache cannot be forced"):
        load_scales(tmp_path / "s", tiny("llama_wide"), force=True)
    longer = tiny("llama", max_position_embeddings=1024)
    message = r"to this model \(.*\), but not to its config: max_positions 512 .*, 1024 .*; calib"
    with pytest.raises(FingerprintError, match=message):
        load_scales(tmp_path / "s", longer)
    with pytest.warns(UserWarning, match=f"forced: .*{message}"):
        load_scales(tmp_path / "s", longer, force=True)


def test_another_tokenizer_is_worth_a_warning(
    tmp_path: Path, tiny: Callable[..., Any], byte_tokenizer: Any
) -> None:
    model = tiny("llama")
    save_scales(scales_of(model, byte_tokenizer), tmp_path / "s")
    byte_tokenizer.add_tokens(["<new>"])
    with pytest.warns(KVQuantWarning, match="another tokenizer .*: calibrate with the") as caught:
        load_scales(tmp_path / "s", model, tokenizer=byte_tokenizer)
    assert [warning.filename for warning in caught] == [__file__], "it points here"


def test_a_name_is_no_model(saved: Path) -> None:
    with pytest.raises(InputError, match="not 'ft-model': give what AutoModelForCausalLM"):
        load_scales(saved, model="ft-model")


@pytest.mark.parametrize(
    ("name", "file"),
    [("s", "s.safetensors"), ("s.safetensors", "s.safetensors"), ("v1.5", "v1.5.safetensors")],
)
def test_scales_are_written_with_their_suffix(tmp_path: Path, name: str, file: str) -> None:
    for path in (tmp_path / name, str(tmp_path / name)):
        save_scales(SCALES, path)
        assert [path.name for path in tmp_path.iterdir()] == [file]
        assert load_scales(path) == SCALES


@pytest.mark.parametrize("name", ["", "/", "/..", "/new/"])
def test_a_directory_is_no_file_to_write(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="it is a directory, name a file in it"):
        suffixed(f"{tmp_path}{name}", ".safetensors")
