"""Random numbers as pure functions of a key: no generator to carry along, and the same numbers on every process.

Every number is a hash of (seed, counters), so row `r` of step `s` draws the same value whether it is requested alone,
in a batch or on another process. The hash is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", 2014) applied after each word of the key.
"""

import hashlib

import numpy as np
from numpy.typing import ArrayLike

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def refuse_seed(seed: int, what: str = "seed") -> None:
    """Raise an error for a seed that does not fit into 64 bits, here and in PyTorch's generators."""
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"{what} must lie between -2^63 and 2^64 - 1, not at {seed}")


def _finalise(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def bits(*key: ArrayLike) -> np.ndarray:
    """Draw 64 random bits for every entry of the broadcast key.

    Args:
        key: integers or integer arrays that broadcast together: a seed, the purpose of the draw, counters.
    """
    value = np.zeros((), np.uint64)
    for word in key:
        with np.errstate(over="ignore"):  # arithmetic modulo 2⁶⁴ is the point
            value = _finalise((value ^ np.asarray(word).astype(np.uint64)) + _GOLDEN)
    return value


def below(bound: ArrayLike, *key: ArrayLike) -> np.ndarray:
    """Draw integers in [0, bound); the bias of the remainder is at most bound / 2⁶⁴."""
    return (bits(*key) % np.asarray(bound).astype(np.uint64)).astype(np.int64)


def uniform(*key: ArrayLike) -> np.ndarray:
    """Draw floats in [0, 1) with 53 random bits."""
    return (bits(*key) >> np.uint64(11)) * 2.0**-53


def shuffled(count: int, *key: int) -> np.ndarray:
    """Draw a random order of `range(count)`."""
    return np.argsort(bits(*key, np.arange(count)), kind="stable")


def key_of(text: str) -> int:
    """Turn a name into a 64-bit word of a key, the same in every process (unlike `hash`)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
