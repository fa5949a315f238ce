"""What `profile` measured: times by length, and what they mean, as a table and in sentences."""

from __future__ import annotations

from dataclasses import dataclass, field

from .._checks import check_choice
from .._columns import aligned, written
from .._drawing import as_html

__all__ = ["AtLength", "Profile"]

#: Speed-ups below this are not worth a pattern.
_WORTH = 1.1


@dataclass(frozen=True)
class AtLength:
    """Times at one length, in seconds.

    Attributes
    ----------
    length : int
    whole, without : float
        The model's forward with our dense attention, and the same with attention replaced by a
        copy. Both take turns: the medians of the rounds' times, and of their ratios.
    layers : dict of int to float
        Dense attention alone, by layer: all calls of a layer together.
    patterns : dict of str to float
        Every pattern in place of dense attention, all layers together.
    peak_bytes : int or None
        Most memory of the forward beyond what was held before it; None on the CPU.
    noise : float
        Standard error of the share, by how far the rounds are from their median.
    """

    length: int
    whole: float
    without: float
    layers: dict[int, float]
    patterns: dict[str, float]
    peak_bytes: int | None
    noise: float = 0.0

    @property
    def share(self) -> float:
        """Attention's share of the forward."""
        return max(0.0, 1 - self.without / self.whole)

    @property
    def within_noise(self) -> bool:
        """Whether the rounds do not tell `share` from 0."""
        return self.share <= 2 * self.noise


@dataclass(frozen=True)
class Profile:
    """What `profile` measured, a row for each length.

    Attributes
    ----------
    rows : tuple of AtLength
    model : str
        The model's class.
    pays_from : dict of str to int or None
        By pattern: the least length from which on it is faster than dense attention on this device,
        with the model's heads; None where it is not at any length that was tried. Measured once on
        random tensors and kept in a file; block lists and block top-k are left out.
    is_causal : bool
        Whether the model's calls are; those of `pays_from` are alike.

    Examples
    --------
    >>> import sparse_attn as sa, torch
    >>> layer = torch.nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    >>> inputs = {"src": torch.randn(1, 256, 64)}
    >>> found = sa.profile(model, inputs, [256], patterns={"band": sa.Band(31)}, progress=False)
    >>> [row.length for row in found.rows]
    [256]
    """

    rows: tuple[AtLength, ...]
    model: str
    pays_from: dict[str, int | None] = field(default_factory=dict)
    is_causal: bool = True

    def crossover(self, name: str) -> int | None:
        """Return the least measured length from which on a pattern is faster than dense.

        Parameters
        ----------
        name : str
            Of a pattern that was timed.

        Returns
        -------
        int or None
            Positions; None where the pattern is not faster at the longest length.

        Raises
        ------
        TypeError, ValueError
            No name, or one that no row has.

        Examples
        --------
        >>> import sparse_attn as sa, torch
        >>> layer = torch.nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
        >>> inputs = {"src": torch.randn(1, 256, 64)}
        >>> found = sa.profile(model, inputs, [256], patterns={"band": sa.Band(31)}, progress=False)
        >>> found.crossover("band") in (256, None)
        True
        """
        check_choice("Profile.crossover", "name", name, list(self.rows[0].patterns))
        found = None
        for row in sorted(self.rows, key=lambda row: -row.length):
            if row.patterns[name] >= sum(row.layers.values()):
                break
            found = row.length
        return found

    def table(self) -> str:
        """Return the figures as fixed-width text, a line for each length.

        Examples
        --------
        >>> import sparse_attn as sa, torch
        >>> layer = torch.nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
        >>> inputs = {"src": torch.randn(1, 256, 64)}
        >>> found = sa.profile(model, inputs, [256], patterns={"band": sa.Band(31)}, progress=False)
        >>> found.table().split()[:3]
        ['length', 'forward', 's']
        """
        names = list(self.rows[0].patterns)
        head = ["length", "forward s", "attention", "dense s", *(f"{name} s" for name in names)]
        lengths = [str(row.length) for row in self.rows]
        shares = [f"{row.share:.0%} ± {_percent(row.noise)}" for row in self.rows]
        whole = written([row.whole for row in self.rows])
        dense = written([sum(row.layers.values()) for row in self.rows])
        sparse = [written([row.patterns[name] for row in self.rows]) for name in names]
        lines = [head, *zip(lengths, whole, shares, dense, *sparse, strict=True)]
        return aligned(lines, left=0)

    def summary(self) -> str:
        """Return what it means, in sentences.

        Examples
        --------
        >>> import sparse_attn as sa, torch
        >>> layer = torch.nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
        >>> inputs = {"src": torch.randn(1, 256, 64)}
        >>> found = sa.profile(model, inputs, [256], patterns={"band": sa.Band(31)}, progress=False)
        >>> found.summary().startswith("At 256 positions our dense attention takes")
        True
        """
        longest = max(self.rows, key=lambda row: row.length)
        lines = [*_verdict(longest)]
        for name in longest.patterns:
            length = self.crossover(name)
            if length is None:
                lines.append(f"{name}: not faster than dense at the longest of these lengths.")
            else:
                times = sum(longest.layers.values()) / longest.patterns[name]
                lines.append(
                    f"{name}: faster than dense attention from {length} positions on, {times:.2f} "
                    f"times as fast at {longest.length}."
                )
        for name, length in self.pays_from.items():
            found = "at no length that was tried" if length is None else f"from {length} keys on"
            kind = "causal" if self.is_causal else "not causal"
            lines.append(f"{name} alone, {kind}, on this device: faster than dense {found}.")
        if longest.peak_bytes is not None:
            lines.append(f"Peak memory of that forward: {longest.peak_bytes / 2**20:.0f} MiB.")
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self.summary()}"

    def _repr_html_(self) -> str:
        """Return the figures for notebooks."""
        return as_html(str(self))


def _verdict(row: AtLength) -> list[str]:
    """Say what attention's share allows, and whether that is worth a pattern."""
    share, noise = f"{row.share:.0%}", _percent(row.noise)
    # Of a share that is within noise, what it may still be.
    most = 1 / max(1e-9, 1 - row.share - (2 * row.noise if row.within_noise else 0))
    takes = f"At {row.length} positions our dense attention takes {share} of the forward"
    if row.within_noise:
        takes += f", which is within the noise of the measurement ({noise})"
        if most >= _WORTH:
            return [f"{takes}: measure longer texts, or on a quieter machine."]
    lines = [f"{takes}: no pattern, however fast, makes that more than {most:.2f} times as fast."]
    if most < _WORTH:
        lines.append(
            "Sparse attention is not worth it at these lengths, even where it is faster than dense."
        )
    return lines


def _percent(noise: float) -> str:
    """Write an error in whole percents, which is never none."""
    return f"{max(noise, 0.01):.0%}"
