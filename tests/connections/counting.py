"""Counting which of a connection's steps are taken."""

import pytest

import jpmhc


def count_steps(monkeypatch: pytest.MonkeyPatch, *names: str) -> dict[str, int]:
    """Return how often each method of these names is called on any connection from now on."""
    counts = dict.fromkeys(names, 0)

    def counting(name, original):
        def count(self, *args):
            counts[name] += 1
            return original(self, *args)

        return count

    for name in names:
        monkeypatch.setattr(jpmhc.HyperConnection, name, counting(name, getattr(jpmhc.HyperConnection, name)))
    return counts
