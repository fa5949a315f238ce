"""The command line: what a model's attention costs, what patterns keep of it, and a policy.

    python -m sparse_attn info
    python -m sparse_attn profile MODEL_FOLDER --text FILE
    python -m sparse_attn compare MODEL_FOLDER --text FILE --out DIR
    python -m sparse_attn advise  MODEL_FOLDER --text FILE --keep 0.95 --out DIR

A wrong model, text, length or device is one sentence on stderr, and exit status 1.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from . import __version__, _load
from ._checks import check_share
from .advisor import advise, profile
from .advisor._candidates import named
from .capability import can_use
from .policy import Policy
from .quality import model as judge

__all__ = ["main"]


class _Wrong(Exception):
    """A sentence for the user."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0, or 1 after a sentence on stderr.

    Parameters
    ----------
    arguments : sequence of str, optional
        By default those of the process.
    """
    options = _parser().parse_args(arguments)
    try:
        commands = {"info": _info, "profile": _profile, "compare": _compare, "advise": _advise}
        commands[options.command](options)
    except (_Wrong, OSError, TypeError, ValueError, NotImplementedError, ImportError) as error:
        sentence = " ".join(str(error).split())
        print(f"python -m sparse_attn {options.command}: {sentence}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sparse_attn",
        description="Sparse attention for a model of yours: what it costs, what it keeps.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("info", help="versions, devices, engines, and why an engine is missing")
    helps = {
        "profile": "attention's share of the time by length, and where patterns begin to pay",
        "compare": "perplexity, top-1 agreement, KL and pairs of patterns (or of a policy file)",
        "advise": "search a policy by layer and key head that keeps what you ask",
    }
    for name, text in helps.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.add_argument(
            "model", type=Path, metavar="MODEL_FOLDER", help="a transformers model, or a .gguf file"
        )
        command.add_argument(
            "--text", type=Path, required=True, metavar="FILE", help="text of your own, UTF-8"
        )
        command.add_argument(
            "--length", type=int, default=2048, metavar="N", help="tokens of a text (2048)"
        )
        command.add_argument("--device", help="cpu, cuda, cuda:1 (a GPU where there is one)")
        own = "float32" if name == "advise" else "bfloat16 on a GPU, float32 on the CPU"
        command.add_argument(
            "--dtype",
            choices=("float32", "float16", "bfloat16"),
            default="float32" if name == "advise" else None,
            help=f"of the weights ({own})",
        )
        command.add_argument("--quiet", action="store_true", help="no progress bar")
        command.add_argument(
            "--out", type=Path, metavar="DIR", help="folder for pictures and files"
        )
        if name == "compare":
            command.add_argument(
                "--policy", type=Path, metavar="FILE", help="a saved policy, instead of patterns"
            )
        if name == "advise":
            command.add_argument(
                "--keep",
                type=float,
                default=0.95,
                help="share of the next tokens that stay dense attention's (0.95)",
            )
            command.add_argument(
                "--validate",
                type=Path,
                metavar="FILE",
                help="text the search does not see (by default the next N tokens of --text)",
            )
            command.add_argument(
                "--by",
                choices=("pairs", "time"),
                default="pairs",
                help="what is made small: pairs (the same everywhere) or predicted time (pairs)",
            )
            command.add_argument("--minutes", type=float, help="about how long the search may take")
            command.add_argument(
                "--resume",
                type=Path,
                metavar="FILE",
                help="keeps what was measured; a search that was cut off goes on from it",
            )
    return parser


def _info(options: argparse.Namespace) -> None:
    print(
        f"sparse_attn {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    )
    try:
        from . import _info as table
    except ImportError as error:
        print(f"build facts: missing ({error})")
    else:
        facts = table.build_facts()
        cuda = f"CUDA {facts['cuda']}" if facts["cuda"] else "no CUDA"
        print(f"built with {facts['compiler']} and {cuda}")
        print(f"CPU: engines {', '.join(table.engine_names(False))}", end="")
        print(
            f"; code for {', '.join(facts['instruction_sets'])}, of which the processor's best runs"
        )
        if facts["cuda_architectures"]:
            print(f"CUDA: code for compute capability {_capabilities(facts['cuda_architectures'])}")
    _tell_of_transformers()
    reason = _load.cuda_error
    if reason is not None:
        print(f"CUDA: no engine, which CUDA tensors alone would need: {reason}")
        return
    if not torch.cuda.is_available():
        print("CUDA: no device that torch sees")
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        query = torch.zeros(1, 1, 128, 64, device=f"cuda:{index}", dtype=torch.bfloat16)
        answer = can_use(query, query, query)
        print(f"cuda:{index}: {name} (sm_{major}{minor}): engine {answer.engine}", end="")
        print("".join(f"; {sentence}" for sentence in answer.reasons))


def _capabilities(architectures: Sequence[str]) -> str:
    """Say which GPUs CMake's architectures are for: of ``virtual`` ones, all that follow."""
    exact, later = [], []
    for architecture in architectures:
        number, _, kind = architecture.partition("-")
        digits = number.rstrip("af")
        capability = f"{digits[:-1]}.{digits[-1]}"
        if kind != "virtual":
            exact.append(capability)
        if kind != "real":
            later.append(capability)
    if not later:
        return ", ".join(exact)
    return f"{', '.join(exact)}; others from {min(later, key=float)} on by PTX"


def _tell_of_transformers() -> None:
    """Print its version, or why models of it are not served."""
    try:
        from .integrations import _requirement
    except ImportError as error:
        print(f"transformers: not served: {error}")
    else:
        print(f"transformers {_requirement.version('transformers')}: served")


def _profile(options: argparse.Namespace) -> None:
    model, tokenizer = _model(options)
    (ids,) = _texts(options, tokenizer, [options.text])
    found = profile(model, ids, progress=not options.quiet)
    print(found)
    if options.out is not None:
        _written(options.out / "profile.txt", found)


def _compare(options: argparse.Namespace) -> None:
    policy = None if options.policy is None else Policy.load(options.policy)
    model, tokenizer = _model(options)
    (ids,) = _texts(options, tokenizer, [options.text])
    policies: dict[str, Any] = named("compare", None, ids.shape[1], "time")
    policies.pop("dense")
    if policy is not None:
        policies = {options.policy.stem: policy}
    found = judge(model, ids, policies, progress=not options.quiet)
    print(found)
    if options.out is not None:
        _written(options.out / "compare.txt", found)
        _saved(found.plot().figure, options.out / "compare.png")


def _advise(options: argparse.Namespace) -> None:
    model, tokenizer = _model(options)
    if options.validate is not None:
        ids, other = _texts(options, tokenizer, [options.text, options.validate])
    else:
        (both,) = _texts(options, tokenizer, [options.text], parts=2)
        ids, other = both.chunk(2, dim=1)
    advice = advise(
        model,
        ids,
        options.keep,
        validate=other,
        by=options.by,
        minutes=options.minutes,
        resume=options.resume,
        progress=not options.quiet,
    )
    print(advice)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        policy, report, picture = (
            options.out / name for name in ("policy.json", "report.html", "advice.png")
        )
        advice.save(policy)
        advice.report(report)
        _saved(advice.plot(), picture)
        print(f"\n{policy}\n{report}\n{picture}")


def _written(path: Path, found: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{found}\n", encoding="utf-8")


def _saved(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _model(options: argparse.Namespace) -> tuple[Any, Any]:
    """Return model and tokenizer from a folder or a GGUF file; nothing is fetched."""
    path: Path = options.model
    if not path.exists():
        raise _Wrong(f"expected a model's folder, got {path}, which does not exist")
    if options.length < 1:
        raise _Wrong(f"expected a length of at least 1, got {options.length}")
    device = _device(options.device)
    _check_files(options)
    if options.command == "advise":
        check_share("advise", "keep", options.keep)
    draws = options.out is not None and options.command != "profile"
    if draws and find_spec("matplotlib") is None:
        raise _Wrong("expected matplotlib for the pictures of --out, got none")
    try:
        import transformers
    except ImportError:
        raise _Wrong("expected transformers to be installed, got none") from None
    transformers.utils.logging.disable_progress_bar()
    dtype = options.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    files = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    files = [file for file in files if file.suffix == ".gguf"]
    has_config = path.is_dir() and (path / "config.json").exists()
    if not has_config and len(files) != 1:
        raise _Wrong(f"expected a folder with config.json, or one .gguf file, got {path}")
    folder = path.parent if path.is_file() else path
    given: dict[str, Any] = {"local_files_only": True}
    if not has_config:
        given["gguf_file"] = files[0].name
    try:
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), output_loading_info=True, **given
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **given)
    except Exception as error:  # of the files, whatever kind their readers raise
        said = " ".join(str(error).split()) or repr(error)
        raise _Wrong(f"expected a causal language model in {path}, got: {said:.200}") from None
    _check_predicts_tokens(path, model, loading["missing_keys"])
    return model.eval().to(device), tokenizer


def _check_predicts_tokens(path: Path, model: Any, missing: set[str]) -> None:
    """Refuse encoders, which load with random output weights, or see what they predict."""
    saved = model.config.architectures or []
    masked = [name for name in saved if name.endswith("ForMaskedLM")]
    if not missing and not masked:
        return
    name = ", ".join(saved) or "a model"
    lacks = f" without weights of {min(missing)}" if missing else ""
    raise _Wrong(
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
                raise _Wrong(f"expected a folder for --out, got {options.out}, {what} is a file")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise _Wrong(f"expected a text file, got {path} ({error.strerror})") from None
    except UnicodeDecodeError:
        raise _Wrong(f"expected a text in UTF-8, got {path}") from None


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # a meta device has nothing to compute
    except (RuntimeError, AssertionError):
        raise _Wrong(f"expected a device of this machine, got {name}") from None
    return device


def _texts(
    options: argparse.Namespace, tokenizer: Any, paths: list[Path], parts: int = 1
) -> list[torch.Tensor]:
    """Return the first tokens of each file, ``(1, parts * length)``."""
    found = []
    for path in paths:
        ids = torch.as_tensor(tokenizer(_read(path), return_tensors="pt", verbose=False).input_ids)
        need = parts * options.length
        if ids.shape[1] < need:
            what = f"{need} tokens" if parts == 1 else f"{need} tokens ({parts} x --length)"
            raise _Wrong(f"expected {what} in {path}, got {ids.shape[1]}; lower --length")
        found.append(ids[:, :need])
    return found
