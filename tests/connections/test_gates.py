"""Read and write constraints, against the n × n matrices they stand for."""

import pytest
import torch

from jpmhc.connections import gates


def test_matrix_read_is_the_stream_mean_of_the_row_stochastic_matrix():
    logits, x = torch.randn(16, dtype=torch.float64), torch.randn(4, 7, dtype=torch.float64)
    expected = (logits.view(4, 4).softmax(-1) @ x).mean(0)  # eq. cayley-fwd1, cayley-fwd2
    assert torch.allclose(gates.READS["softmax_matrix"](logits, 4) @ x, expected)


def test_matrix_write_is_the_column_stochastic_matrix_on_equal_inputs():
    logits, y = torch.randn(16, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    expected = logits.view(4, 4).softmax(-2) @ y.expand(4, 7)  # eq. cayley-fwd
    assert torch.allclose(gates.WRITES["softmax_matrix"](logits, 4)[:, None] * y, expected)


@pytest.mark.parametrize("name", gates.READS)
@pytest.mark.parametrize("n", [2, 4, 5])
def test_reads_start_where_they_are_told(name, n):
    weights = gates.favouring(n + 1, n)
    assert weights.argmax() == 1
    gate = gates.READS[name]
    logits = gate.start(weights)
    assert logits.shape == (gate.size(n),)
    assert torch.allclose(gate(logits, n), weights)


@pytest.mark.parametrize("name", gates.WRITES)
@pytest.mark.parametrize("n", [2, 4, 5])
def test_writes_start_where_they_are_told(name, n):
    weights = torch.linspace(0.5, 1.5, n, dtype=torch.float64)
    gate = gates.WRITES[name]
    assert torch.allclose(gate(gate.start(weights), n), weights)
