"""Write the attention functions out: ``python -m scripts.write_functions``.

They share SDPA's arguments and the common ones, which an editor shows only where they are spelled
out. Templates (``scripts/templates/**/*.py.in``, one for each file of the package) hold what is a
function's own; this script puts in, for

    {tensors} {sdpa} {common}   alone in a line of a signature: parameters
    {tensors} {common}          alone in a line of a docstring: their words, Returns and Raises;
                                {common of sequences} and {common of pages} where rows are packed
    {given}                     alone in a line of a body: puts into `common` what a call gives

and the overloads by ``return_lse``. A new common argument is a row below and one in
``sparse_attn/_common.py``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from .digests import ROOT

TEMPLATES = ROOT / "scripts" / "templates"


class Argument(NamedTuple):
    """A parameter as it stands in a signature, and its words."""

    name: str
    annotation: str
    default: str
    words: str


TENSOR = "torch.Tensor | None"

#: As `torch.nn.functional.scaled_dot_product_attention` has them. A float default would be an input
#: of a compiled graph, which is then traced twice: hence 0.
SDPA = (
    Argument(
        "attn_mask",
        TENSOR,
        "None",
        """attn_mask : Tensor, optional
    What SDPA takes: bool (true is allowed) or additive (float32 or query's dtype),
    broadcastable to ``(B, Hq, Sq, Skv)``; intersected with the pattern.""",
    ),
    Argument(
        "dropout_p",
        "float",
        "0",
        """dropout_p : float
    Must be 0: inference only.""",
    ),
    Argument(
        "is_causal",
        "bool",
        "False",
        """is_causal : bool
    Keys ``j <= p`` only, with the lower-right alignment ``p = i + Skv - Sq``. For ``Sq != Skv``
    this differs from SDPA, whose ``is_causal`` aligns the upper left corner.""",
    ),
    Argument(
        "scale",
        "float | None",
        "None",
        """scale : float, optional
    Of the scores, ``1 / sqrt(D)`` by default; finite, at most 2.3e38 in size.""",
    ),
    Argument(
        "enable_gqa",
        "bool",
        "False",
        """enable_gqa : bool
    Accepted and never needed: fewer key heads are always shared.""",
    ),
)

COMMON = (
    Argument(
        "key_bounds",
        TENSOR,
        "None",
        """key_bounds : Tensor, optional
    int32 ``(B, 1 or Hq, Sq, 2)``: row i sees keys ``[lo, hi)`` only. Documents that are packed
    into a row by bounds have one origin: sinks and the first global tokens are the row's. In
    `varlen_attention` each document has its own.""",
    ),
    Argument(
        "query_offset",
        "int | torch.Tensor | None",
        "None",
        """query_offset : int or Tensor, optional
    Key position of query 0, ``p = i + query_offset``; or int32 ``(B,)`` on the device. By
    default ``Skv - Sq``. Beyond ``2**29 - 1`` to either side it counts as that.""",
    ),
    Argument(
        "key_origin",
        TENSOR,
        "None",
        """key_origin : Tensor, optional
    int32 ``(B,)`` on the device: the key at which the entry's text begins, 0 by default. Sinks,
    the first global tokens, strided columns and forced first blocks count from it; positions,
    and so windows, do not change. Below 0 in a cache that dropped its first keys.""",
    ),
    Argument(
        "softcap",
        "float",
        "0",
        """softcap : float
    Scores become ``c * tanh(s / c)`` before the mask; 0 is off.""",
    ),
    Argument(
        "sink_logits",
        TENSOR,
        "None",
        """sink_logits : Tensor, optional
    ``(Hq,)``: a logit for each head that joins the softmax's denominator only.""",
    ),
    Argument(
        "alibi_slopes",
        TENSOR,
        "None",
        """alibi_slopes : Tensor, optional
    ``(Hq,)`` or ``(B, Hq)``: adds ``-slope * |p - j|`` to the score of key j, after softcap
    (Press et al. 2021, ALiBi).""",
    ),
    Argument(
        "key_scale",
        TENSOR,
        "None",
        """key_scale : Tensor, optional
    What keys of float8_e4m3fn are multiplied by: float32 on the device, 0-d, ``(Hkv,)`` or
    ``(B, Hkv)``, above 0; 1 by default.""",
    ),
    Argument(
        "value_scale",
        TENSOR,
        "None",
        """value_scale : Tensor, optional
    The same for values.""",
    ),
    Argument(
        "return_lse",
        "bool",
        "False",
        """return_lse : bool
    Also return the natural-log log-sum-exp over the keys,
    float32 {lse}.""",
    ),
    Argument(
        "out",
        TENSOR,
        "None",
        """out : Tensor, optional
    {out} of query's dtype, may be strided, must overlap
    no input; it is returned. Refused in grad mode when an input requires grad.""",
    ),
    Argument(
        "engine",
        "str",
        '"auto"',
        """engine : {"auto", "naive", "tiled", "portable", "small", "decode", "hopper"}
    ``auto`` takes the fastest that serves the case; see `can_use`.""",
    ),
)

TENSORS = tuple(Argument(name, "torch.Tensor", "", "") for name in ("query", "key", "value"))

TENSOR_WORDS = """query : Tensor
    ``(B, Hq, Sq, D)``, float32, float16 or bfloat16; any strides with a contiguous last
    dimension. D is a multiple of 8 up to 256.
key : Tensor
    ``(B, Hkv, Skv, D)`` with ``Hq % Hkv == 0``; key heads are shared without a copy. Of query's
    dtype, or float8_e4m3fn beside float16 and bfloat16.
value : Tensor
    ``(B, Hkv, Skv, Dv)`` of key's dtype; Dv may differ from D, with the same limits."""

OUTCOME_WORDS = """
Returns
-------
Tensor or (Tensor, Tensor)
    The output {out} in query's dtype and stride order,
    and the lse when asked for. A row without keys is zero, its lse -inf.

Raises
------
TypeError
    An argument of a wrong kind.
ValueError
    A wrong call, in one sentence: the argument, what was expected, what came.
NotImplementedError
    A right call that no engine serves."""

#: Words of arguments that calls of sequences refuse.
UNSERVED = {
    "attn_mask": "attn_mask, key_bounds : None\n    Refused: both need a batch of one length.",
    "key_bounds": "",
}


class Form(NamedTuple):
    """How a docstring writes the common words."""

    out: str
    lse: str
    instead: dict[str, str]


FORMS = {
    "common": Form("``(B, Hq, Sq, Dv)``", "``(B, Hq, Sq)``", {}),
    "common of sequences": Form("``(T, Hq, Dv)``", "``(Hq, T)``", UNSERVED),
    "common of pages": Form(
        "``(B, Hq, Sq, Dv)`` or ``(T, Hq, Dv)``", "``(B, Hq, Sq)`` or ``(Hq, T)``", UNSERVED
    ),
}

#: What ``return_lse`` may be, and what comes back then.
OVERLOADS = (
    ("Literal[False] = False", "torch.Tensor"),
    ("Literal[True]", "tuple[torch.Tensor, torch.Tensor]"),
    ("bool", "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"),
)
#: What a function has that may return indices too; its overloads by ``return_lse`` do not.
INDICES = "return_indices: bool = False"


def _parameters(arguments: tuple[Argument, ...]) -> str:
    lines = []
    for name, annotation, default, _ in arguments:
        lines.append(f"    {name}: {annotation}" + (f" = {default}" if default else "") + ",")
    return "\n".join(lines)


def _indented(words: str) -> str:
    return re.sub(r"^(?=.)", "    ", words, flags=re.MULTILINE)


def _given(arguments: tuple[Argument, ...]) -> str:
    """Return the lines that tell which arguments a call gives: a call pays for what it says."""
    lines = ["common: dict[str, Any] = {}"]
    for name, _, default, _ in arguments:
        same = "!=" if default.startswith('"') else "is not"
        default = "ZERO" if default == "0" else default  # Python warns of `is` beside a literal
        lines += [f"if {name} {same} {default}:", f'    common["{name}"] = {name}']
    return "\n".join(lines)


def _overloads(name: str, parameters: str) -> str:
    """Return a function's overloads; `parameters` are the lines between its parentheses."""
    blocks = []
    plain = parameters.replace(INDICES, "return_indices: Literal[False] = False")
    for kind, result in OVERLOADS:
        given = plain.replace("return_lse: bool = False", f"return_lse: {kind}")
        blocks.append((given, result))
    if plain != parameters:
        given = parameters.replace(INDICES, "return_indices: Literal[True]")
        blocks.append((given, "tuple[torch.Tensor, ...]"))
        given = parameters.replace(INDICES, "return_indices: bool")
        blocks.append((given, "torch.Tensor | tuple[torch.Tensor, ...]"))
    return "".join(
        f"@overload\ndef {name}(\n{given}\n) -> {result}: ...\n\n\n" for given, result in blocks
    )


def _common_words(form: Form) -> str:
    rows = [form.instead.get(row.name, row.words) for row in (*SDPA, *COMMON)]
    words = "\n".join([*filter(None, rows), OUTCOME_WORDS])
    return words.replace("{out}", form.out).replace("{lse}", form.lse)


def expanded(template: str) -> str:
    """Return a template's file."""
    signature = {"tensors": TENSORS, "sdpa": SDPA, "common": COMMON}

    def function(match: re.Match[str]) -> str:
        decorators, name, parameters = match.groups()
        for part, arguments in signature.items():
            parameters = parameters.replace(f"    {{{part}}}", _parameters(arguments))
        plain = "return_lse" not in parameters
        overloads = "" if plain else _overloads(name, parameters)
        return f"{overloads}{decorators}def {name}(\n{parameters}\n) -> "

    text = re.sub(r"^((?:@.*\n)*)def (\w+)\(\n(.*?)\n\) -> ", function, template, flags=re.M | re.S)
    text = text.replace("    {tensors}", _indented(TENSOR_WORDS))
    for name, form in FORMS.items():
        text = text.replace(f"    {{{name}}}", _indented(_common_words(form)))
    return text.replace("    {given}", _indented(_given((*SDPA, *COMMON))))


def files() -> dict[Path, str]:
    """Return what every file that has a template should hold."""
    found = {}
    for template in sorted(TEMPLATES.rglob("*.py.in")):
        path = template.relative_to(TEMPLATES).with_suffix("")
        found[ROOT / "sparse_attn" / path] = expanded(template.read_text())
    return found


def main() -> None:
    """Write the files that differ."""
    for path, text in files().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
