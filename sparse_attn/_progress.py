"""A progress bar where tqdm is installed, on stderr; nothing else without it."""

from __future__ import annotations

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

    def step(self, name: str, steps: int = 1, left: float | None = None) -> None:
        """Finish steps; `name` says what comes next, `left` how many seconds all that takes.

        Without `left` the bar takes all steps for equal.
        """
        if self._bar is not None:
            if left is not None:
                self._bar.bar_format = "{desc}{percentage:3.0f}%|{bar:20}| {elapsed}{postfix}"
                about = f"{left / 60:.0f} min" if left >= 90 else f"{left:.0f} s"
                self._bar.postfix = f"about {about} left"
            self._bar.set_description(name, refresh=False)
            self._bar.update(steps)

    def expect(self, steps: int) -> None:
        """Take so many steps for what is still to come."""
        if self._bar is not None:
            self._bar.total = self._bar.n + steps

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()
