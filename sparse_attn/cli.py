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
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from . import __version__, _load
from ._cli_inputs import Wrong, model_of, texts_of
from ._columns import aligned
from .advisor import advise, profile
from .advisor._candidates import named
from .capability import ENGINES, can_use
from .policy import Policy
from .quality import model as judge
from .quality._named import DENSE_NAME

__all__ = ["main"]


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
    except (Wrong, OSError, TypeError, ValueError, NotImplementedError, ImportError) as error:
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
    rows = [("sparse_attn", __version__), ("Python", platform.python_version())]
    rows += [("torch", torch.__version__), ("transformers", _transformers())]
    print(aligned([*rows, *_processor_and_build(), *_gpus()]))


def _processor_and_build() -> list[tuple[str, str]]:
    """Say what the build has for CPUs, and what it was made with."""
    served = f"served by {' and '.join(ENGINES['cpu'])}"
    try:
        from . import _info as build
    except ImportError as error:
        return [("CPU", served), ("built with", f"not known: {error}")]
    facts = build.build_facts()
    code = ", ".join(facts["instruction_sets"])
    cuda = "no CUDA"
    if facts["cuda"]:
        cuda = f"CUDA {facts['cuda']}"
    if facts["cuda_architectures"]:
        cuda += f" for GPUs of compute capability {_capabilities(facts['cuda_architectures'])}"
    return [
        ("CPU", f"{served} (code for {code}; the best that the processor has runs)"),
        ("built with", f"{facts['compiler']} and {cuda}"),
    ]


def _gpus() -> list[tuple[str, str]]:
    """Say of each GPU which engine serves it, or why there is none."""
    if _load.cuda_error is not None:
        return [("GPU", f"not served, the CPU alone is: {_load.cuda_error}")]
    if not torch.cuda.is_available():
        return [("GPU", "none that torch sees")]
    rows = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        query = torch.zeros(1, 1, 128, 64, device=f"cuda:{index}", dtype=torch.bfloat16)
        answer = can_use(query, query, query)
        serves = f"served by {answer.engine}" if answer else "not served"
        name = f"{torch.cuda.get_device_name(index)} (compute capability {major}.{minor})"
        rows.append((f"cuda:{index}", "; ".join([f"{name}: {serves}", *answer.reasons])))
    return rows


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


def _transformers() -> str:
    """Return its version, or why models of it are not served."""
    try:
        from .integrations import _requirement  # noqa: F401, which refuses older ones
    except ImportError as error:
        return f"not served: {error}"
    return version("transformers")


def _profile(options: argparse.Namespace) -> None:
    model, tokenizer = model_of(options)
    (ids,) = texts_of(options, tokenizer, [options.text])
    found = profile(model, ids, progress=not options.quiet)
    print(found)
    if options.out is not None:
        _written(options.out / "profile.txt", found)


def _compare(options: argparse.Namespace) -> None:
    policy = None if options.policy is None else Policy.load(options.policy)
    model, tokenizer = model_of(options)
    (ids,) = texts_of(options, tokenizer, [options.text])
    policies: dict[str, Any] = named("compare", None, ids.shape[1], "time")
    policies.pop(DENSE_NAME)
    if policy is not None:
        name = options.policy.stem
        policies = {f"policy {name}" if name == DENSE_NAME else name: policy}
    found = judge(model, ids, policies, progress=not options.quiet)
    print(found)
    if options.out is not None:
        _written(options.out / "compare.txt", found)
        _saved(found.plot().figure, options.out / "compare.png")


def _advise(options: argparse.Namespace) -> None:
    model, tokenizer = model_of(options)
    if options.validate is not None:
        ids, other = texts_of(options, tokenizer, [options.text, options.validate])
    else:
        (both,) = texts_of(options, tokenizer, [options.text], parts=2)
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
