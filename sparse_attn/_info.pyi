from typing import TypedDict

class BuildFacts(TypedDict):
    version: str
    compiler: str
    instruction_sets: list[str]
    cuda: str | None
    cuda_architectures: list[str]

def build_facts() -> BuildFacts: ...
def engine_names(cuda: bool) -> list[str]: ...
def choose_engine(
    requested: str = "auto",
    *,
    cuda: bool = False,
    sm: int = 0,
    dtype: str = "float32",
    head_dim: int = 0,
    seq_q: int = 0,
    seq_kv: int = 0,
    aligned: bool = True,
    dense_mask: bool = False,
    scattered_globals: bool = False,
    topk: bool = False,
    key_bounds: bool = False,
    scale: float = 1.0,
    softcap: float = 0.0,
    block_q: int = 0,
    block_kv: int = 0,
) -> tuple[str | None, list[str]]: ...
