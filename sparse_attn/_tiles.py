"""The tiles of queries and keys that engines visit for a pattern: what a call costs, drawn.

Windows and columns ask the compiled module ``_info``, which reads the definition that the engines
read (``csrc/visited_tiles.h``); those of layouts stand in ``layout_tiles``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ._checks import Integer, check_kind, check_length, refuse

__all__ = ["TileRun", "checked_tile", "tile_picture", "tile_runs"]


class TileRun(NamedTuple):
    """Neighbouring tiles of keys that the rows of one query tile visit.

    Rows are ``row, row + row_step, ...``, keys likewise; `masked` where some pair of them is not
    allowed, so that the tile needs a mask.
    """

    row: int
    row_step: int
    rows: int
    key: int
    key_step: int
    keys: int
    tiles: int
    masked: bool


def checked_tile(owner: str, tile: Any) -> tuple[int, int]:
    """Return the queries and keys of a tile: an int is both."""
    if isinstance(tile, (tuple, list)):
        if len(tile) != 2:
            raise refuse(owner, "tile of (queries, keys)", tuple(tile))
    else:
        check_kind(owner, "tile", tile, Integer, "an int or a pair (queries, keys)")
        tile = (tile, tile)
    queries, keys = (check_length(owner, "tile", side, 1) for side in tile)
    return queries, keys


def tile_runs(
    Sq: int,
    Skv: int,
    is_causal: bool,
    tile: tuple[int, int],
    *,
    left: int | None = None,
    right: int | None = None,
    dilation: int = 1,
    columns: tuple[int, int, int] = (0, 1, 0),
    num_global: int = 0,
    global_tokens: torch.Tensor | None = None,
) -> list[TileRun]:
    """Return the runs of a window and of leading columns.

    Parameters
    ----------
    Sq, Skv, is_causal, tile
        The call, and the rows and keys of a tile.
    left, right, dilation, num_global, global_tokens
        As the ops take them.
    columns : (int, int, int)
        The first key that every row sees, their step and their number.

    Raises
    ------
    NotImplementedError
        Where the module is not built.
    """
    try:
        from . import _info
    except ImportError as error:
        raise NotImplementedError(
            "sparse_attn: not served: visited tiles without the module _info; build it with "
            "pybind11 and Python's headers in place"
        ) from error
    tokens = [] if global_tokens is None else global_tokens.long().clamp(-1, Skv).tolist()
    runs = _info.visited_tiles(
        Sq,
        Skv,
        tile,
        is_causal=is_causal,
        left=left,
        right=right,
        dilation=dilation,
        columns=columns,
        num_global=num_global,
        global_tokens=tokens,
    )
    return [TileRun(*run) for run in runs]


def tile_picture(runs: list[TileRun], mask: torch.Tensor) -> torch.Tensor:
    """Return a picture ``(Sq, Skv)`` of the mask and its tiles.

    0 for pairs that no tile visits, 1 for pairs of visited tiles that the mask leaves out, 2 for
    allowed pairs of tiles that need a mask, 3 for those of tiles seen whole.
    """
    picture = torch.zeros(mask.shape, dtype=torch.uint8, device=mask.device)
    for run in runs:
        rows = slice(run.row, run.row + run.rows * run.row_step, run.row_step)
        keys = slice(run.key, run.key + run.keys * run.key_step, run.key_step)
        seen = mask[rows, keys]
        kind = torch.where(seen, 2 if run.masked else 3, 1).to(torch.uint8)
        picture[rows, keys] = torch.maximum(picture[rows, keys], kind)
    return picture
