"""Key sketches in plain float64 torch: of keys, and from a sketch's own tensors."""

import torch


def sketched(key, bits, group=64):
    """Keys as a sketch holds them, in float64: codes between their group's extremes by channel."""
    levels = 2**bits - 1
    parts = []
    for part in key.split(group):
        least, greatest = part.amin(0), part.amax(0)
        span = (greatest.float() - least.float()).clamp(min=1e-38)
        codes = ((part.float() - least.float()) / span * levels).round()
        parts.append(
            least.double() + codes.double() * (greatest.double() - least.double()) / levels
        )
    return torch.cat(parts)


def sketched_keys(sketch):
    """What the codes of a sketch stand for, in float64: (entries, Hkv, rows, D)."""
    codes, levels, channel = sketch.codes.cpu(), 2**sketch.bits - 1, torch.arange(32 // sketch.bits)
    codes = codes[..., None] >> channel // 2 * sketch.bits + channel % 2 * 16 & levels
    ranges = sketch.ranges.cpu().double().unsqueeze(3)  # of (entries, Hkv, groups, 1, 2, D)
    codes = codes.flatten(-2)[..., : ranges.shape[-1]].unflatten(2, (ranges.shape[2], -1))
    least, greatest = ranges.unbind(4)
    return (least + codes * (greatest - least) / levels).flatten(2, 3)
