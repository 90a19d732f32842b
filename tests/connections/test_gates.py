"""The inverses of the gates; test_hyper.py compares the gates with the matrices of the paper."""

import pytest
import torch

from jpmhc.connections import gates


@pytest.mark.parametrize("n", [2, 4, 5])
def test_gates_start_where_they_are_told(n):
    assert gates.favouring(n + 1, n).argmax() == 1
    weights = torch.linspace(0.5, 1.5, n, dtype=torch.float64)  # their sum is n
    for kinds, wanted in ((gates.READS, weights / n), (gates.WRITES, weights)):
        for gate in kinds.values():
            logits = gate.start(wanted)
            assert logits.shape == (gate.size(n),)
            assert torch.allclose(gate(logits, n), wanted)
