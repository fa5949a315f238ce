from typing import TypedDict

class BuildFacts(TypedDict):
    version: str
    compiler: str
    instruction_sets: list[str]
    cuda: str | None
    cuda_architectures: list[str]

def build_facts() -> BuildFacts: ...
def engine_names(cuda: bool) -> list[str]: ...
