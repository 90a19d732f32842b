"""Random numbers as pure functions of a key, without a generator, and equal on every process.

Every number is a hash of a seed and counters, so row `r` of step `s` gets the same value whether it is computed alone,
in a batch or on another process. The hash applies the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", 2014) after each word of the key.
"""

import hashlib
from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def refuse_seed(seed: int, name: str = "seed") -> None:
    """Raise a ValueError for a seed that does not fit into 64 bits; PyTorch's generators have the same limits."""
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"{name} must lie between -2^63 and 2^64 - 1, not at {seed}")


Seed = Annotated[int, refuse_seed]  # type of a seed among settings, for `checks.fields`


def _finalise(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def bits(*key: ArrayLike) -> np.ndarray:
    """Return 64 random bits for every entry of the key, uint64.

    The key's parts, such as a seed and arrays of counters, are broadcast against each other.
    """
    value = np.zeros((), np.uint64)
    for word in key:
        with np.errstate(over="ignore"):  # arithmetic modulo 2⁶⁴ is intended
            value = _finalise((value ^ np.asarray(word).astype(np.uint64)) + _GOLDEN)
    return value


def below(bound: ArrayLike, *key: ArrayLike) -> np.ndarray:
    """Return random integers in [0, bound), whose probabilities are biased by at most bound / 2⁶⁴."""
    return (bits(*key) % np.asarray(bound).astype(np.uint64)).astype(np.int64)


def uniform(*key: ArrayLike) -> np.ndarray:
    """Return random floats in [0, 1) with 53 random bits."""
    return (bits(*key) >> np.uint64(11)) * 2.0**-53


def shuffled(count: int, *key: int) -> np.ndarray:
    """Return the random permutation of `range(count)` that the key determines."""
    return np.argsort(bits(*key, np.arange(count)), kind="stable")


def key_of(text: str) -> int:
    """Return a 64-bit hash of a name for use in keys; unlike `hash`, it is equal in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
