"""examples/finetune_lora.py as a user runs it, and the adapter it made for the repository."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file

from kvquant.errors import DataError

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "finetune_lora.py"
ASSET = ROOT / "tests" / "assets" / "smollm2-python-lora"
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def base(tiny: Any, save_tiny: Any, tmp_path_factory: Any) -> Path:
    return save_tiny(tiny("llama"), tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: Any) -> Path:
    return _train(base, tmp_path_factory.mktemp("adapter"))


def _train(base: Path, output: Path) -> Path:
    done = run("--model", base, "--output", output, "--steps", 2, "--tokens", 64, "--seed", 3)
    assert done.returncode == 0, done.stderr
    assert "held-out loss before:" in done.stdout
    assert "held-out loss after:" in done.stdout
    assert "2/2" in done.stdout
    return output


def test_peft_loads_what_was_saved(tiny: Any, adapter: Path) -> None:
    saved = load_file(adapter / "adapter_model.safetensors")
    loaded = get_peft_model_state_dict(PeftModel.from_pretrained(tiny("llama"), str(adapter)))

    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert len(saved) == 2 * 2 * len(PROJECTIONS)  # A and B, in 2 layers
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name].bfloat16(), saved[name]) for name in saved)


def test_training_moved_keys_and_values(adapter: Path) -> None:
    saved = load_file(adapter / "adapter_model.safetensors")

    # B starts at zero: as long as it is zero, the adapter does nothing.
    for layer in (0, 1):
        for projection in ("k_proj", "v_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{projection}.lora_B.weight"
            assert saved[name].abs().max() > 0


def test_config_names_base_and_targets(base: Path, adapter: Path) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())

    assert config["base_model_name_or_path"] == str(base)
    assert set(config["target_modules"]) == PROJECTIONS
    assert config["r"] == 8


def test_same_seed_same_bits(base: Path, adapter: Path, tmp_path: Path) -> None:
    again = load_file(_train(base, tmp_path) / "adapter_model.safetensors")
    first = load_file(adapter / "adapter_model.safetensors")

    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "513"], "has 512 positions: --tokens 513 is too many"),
        (["--steps", "0"], "--steps takes 1 or more"),
        (["--tokens", "1"], "--tokens 2 or more"),
        (["--model", "no/such/directory"], "no/such/directory"),
    ],
)
def test_bad_input_is_one_line(
    base: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, options: list[str], message: str
) -> None:
    output = tmp_path / "none"
    command = [str(EXAMPLE), "--model", str(base), "--output", str(output), *options]
    monkeypatch.setattr(sys, "argv", command)

    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert message in capsys.readouterr().err
    assert not output.exists()


def test_too_little_text_says_how_much_there_is(tmp_path: Path, byte_tokenizer: Any) -> None:
    token_blocks = runpy.run_path(str(EXAMPLE))["token_blocks"]
    (tmp_path / "one.py").write_text("abcd")
    (tmp_path / "two.py").write_text("efgh")
    files = [tmp_path / "one.py", tmp_path / "two.py"]

    blocks = token_blocks(iter(files), byte_tokenizer, 3, 3)

    assert blocks.tolist() == [[97, 98, 99], [100, 2, 101], [102, 103, 104]]
    with pytest.raises(DataError, match="has 10 tokens left, 4 blocks of 3 need 12"):
        token_blocks(iter(files), byte_tokenizer, 3, 4)


def test_asset_is_small_and_of_no_machine() -> None:
    config = json.loads((ASSET / "adapter_config.json").read_text())
    saved = load_file(ASSET / "adapter_model.safetensors")

    assert (ASSET / "adapter_model.safetensors").stat().st_size < 2_000_000
    assert config["base_model_name_or_path"] == "smollm2"
    assert set(config["target_modules"]) == PROJECTIONS
    assert [value for value in config.values() if str(value).startswith("/")] == []
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert len(saved) == 2 * 30 * len(PROJECTIONS)


@pytest.mark.real_model
def test_asset_reads_python_better_than_its_base() -> None:
    from kvquant.models.loading import load, resolve

    loaded = load(resolve("smollm2"), dtype="float32", device="cpu", notify=print)
    # A module that training has not seen: only top-level ones are used.
    source = Path(json.__file__).with_name("decoder.py").read_text(encoding="utf-8")
    ids = torch.tensor([loaded.tokenizer(source)["input_ids"][:1024]])
    with torch.no_grad():
        before = loaded.model(input_ids=ids, labels=ids).loss.item()
        adapted = PeftModel.from_pretrained(loaded.model, str(ASSET)).eval()
        after = adapted(input_ids=ids, labels=ids).loss.item()

    assert after < before - 0.05
