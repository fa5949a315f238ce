from collections.abc import Sequence
from typing import TypedDict

class BuildFacts(TypedDict):
    version: str
    compiler: str
    instruction_sets: list[str]
    cuda: str | None
    cuda_architectures: list[str]

def build_facts() -> BuildFacts: ...
def visited_tiles(
    seq_q: int,
    seq_kv: int,
    tile: tuple[int, int],
    *,
    is_causal: bool,
    left: int | None,
    right: int | None,
    dilation: int,
    columns: tuple[int, int, int],
    num_global: int,
    global_tokens: Sequence[int],
) -> list[tuple[int, int, int, int, int, int, int, bool]]: ...
