"""A progress bar where tqdm is installed, on stderr; nothing else without it."""

from __future__ import annotations

from types import TracebackType
from typing import Any

__all__ = ["Progress"]


class Progress:
    """Steps of a long task, shown while it runs.

    Parameters
    ----------
    total : int
        Number of steps.
    show : bool
        Whether a bar is wanted.
    """

    def __init__(self, total: int, show: bool = True) -> None:
        self._bar: Any = None
        if show:
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=total, leave=False)

    def step(self, name: str, steps: int = 1) -> None:
        """Finish steps; `name` says what comes next."""
        if self._bar is not None:
            self._bar.set_description(name, refresh=False)
            self._bar.update(steps)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
