"""Noise that is a function of where it is needed, not of when."""

from __future__ import annotations

from torch import Tensor

__all__ = ["counter_noise"]


def _i64(value: int) -> int:
    """Wrap an unsigned 64-bit constant into the signed range torch uses."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def counter_noise(counter: Tensor, seed: int, salt: int = 0, stream: int = 0) -> Tensor:
    """Return float32 uniforms in (0, 1) shaped like `counter` (int64): the SplitMix64 finaliser of the counters.

    Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
    """
    key = (seed * 0x9E3779B97F4A7C15 + salt * 0xBF58476D1CE4E5B9 + stream * 0x94D049BB133111EB) % (1 << 64)
    # The algorithm counts before it mixes; without that the first token of seed 0 would always get the lowest number.
    x = (counter + 1) * _i64(0x9E3779B97F4A7C15) + _i64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        # torch shifts signed integers arithmetically; the mask makes it the logical shift of the algorithm.
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * _i64(factor)
    x = x ^ ((x >> 31) & ((1 << 33) - 1))
    bits = (x >> 41) & ((1 << 23) - 1)  # 23 bits, so that the half step below stays exact in float32
    return (bits.float() + 0.5) / (1 << 23)
