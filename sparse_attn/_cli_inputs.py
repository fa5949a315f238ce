"""What a command of `cli` reads: a model and its tokenizer, and texts. Nothing is fetched.

Everything that can be refused is refused before the model is loaded.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch

from ._checks import check_share

__all__ = ["Wrong", "model_of", "texts_of"]


class Wrong(Exception):
    """A sentence for the user."""


def model_of(options: argparse.Namespace) -> tuple[Any, Any]:
    """Return model and tokenizer from a folder or a GGUF file."""
    path: Path = options.model
    device = _check(options)
    try:
        import transformers
    except ImportError:
        raise Wrong("expected transformers to be installed, got none") from None
    transformers.utils.logging.disable_progress_bar()
    dtype = options.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    folder, given = _source(path)
    try:
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), output_loading_info=True, **given
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **given)
    except Exception as error:  # of the files, whatever kind their readers raise
        said = " ".join(str(error).split()) or repr(error)
        raise Wrong(f"expected a causal language model in {path}, got: {said:.200}") from None
    _check_predicts_tokens(path, model, loading["missing_keys"])
    return model.eval().to(device), tokenizer


def _check(options: argparse.Namespace) -> torch.device:
    """Refuse what options alone show to be wrong; return the device."""
    if not options.model.exists():
        raise Wrong(f"expected a model's folder, got {options.model}, which does not exist")
    if options.length < 1:
        raise Wrong(f"expected a length of at least 1, got {options.length}")
    device = _device(options.device)
    _check_files(options)
    if options.command == "advise":
        check_share("advise", "keep", options.keep)
    draws = options.out is not None and options.command != "profile"
    if draws and find_spec("matplotlib") is None:
        what = "matplotlib for the pictures of --out (the extra `plot`)"
        raise Wrong(f"expected {what}, got none: pip install matplotlib")
    return device


def _source(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a model, and the arguments that have its files read."""
    files = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    files = [file for file in files if file.suffix == ".gguf"]
    given: dict[str, Any] = {"local_files_only": True}
    if not (path / "config.json").exists():
        if len(files) != 1:
            raise Wrong(f"expected a folder with config.json, or one .gguf file, got {path}")
        given["gguf_file"] = files[0].name
    return (path if path.is_dir() else path.parent), given


def _check_predicts_tokens(path: Path, model: Any, missing: set[str]) -> None:
    """Refuse encoders, which load with random output weights, or see what they predict."""
    saved = model.config.architectures or []
    masked = [name for name in saved if name.endswith("ForMaskedLM")]
    if not missing and not masked:
        return
    name = ", ".join(saved) or "a model"
    lacks = f" without weights of {min(missing)}" if missing else ""
    raise Wrong(
        f"expected a causal language model in {path}, got {name}{lacks}; an encoder goes to "
        "sa.profile, sa.quality.model and sa.advise in Python"
    )


def _check_files(options: argparse.Namespace) -> None:
    """Refuse texts that cannot be read and results that cannot be written, before the work."""
    for text in (options.text, getattr(options, "validate", None)):
        if text is not None:
            _read(text)
    if options.out is not None:
        for part in (options.out, *options.out.parents):
            if part.exists() and not part.is_dir():
                what = "which" if part == options.out else f"whose part {part}"
                raise Wrong(f"expected a folder for --out, got {options.out}, {what} is a file")
        there = next(part for part in (options.out, *options.out.parents) if part.exists())
        try:
            TemporaryFile(dir=there).close()
        except OSError as error:
            got = f"{options.out} ({there}: {error.strerror})"
            raise Wrong(f"expected --out where files can be made, got {got}") from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise Wrong(f"expected a text file, got {path} ({error.strerror})") from None
    except UnicodeDecodeError:
        raise Wrong(f"expected a text in UTF-8, got {path}") from None


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # a meta device has nothing to compute
    except (RuntimeError, AssertionError):
        raise Wrong(f"expected a device of this machine, got {name}") from None
    return device


def texts_of(
    options: argparse.Namespace, tokenizer: Any, paths: list[Path], parts: int = 1
) -> list[torch.Tensor]:
    """Return the first tokens of each file, ``(1, parts * length)``."""
    found = []
    for path in paths:
        ids = torch.as_tensor(tokenizer(_read(path), return_tensors="pt", verbose=False).input_ids)
        need = parts * options.length
        if ids.shape[1] < need:
            what = f"{need} tokens" if parts == 1 else f"{need} tokens ({parts} x --length)"
            advice = "lower --length" if ids.shape[1] >= parts else "give a longer text"
            raise Wrong(f"expected {what} in {path}, got {ids.shape[1]}; {advice}")
        found.append(ids[:, :need])
    return found
