"""The average against its closed form."""

import torch

from jpmhc.experiments.training.ema import WeightAverage


def test_average_of_a_jump_decays_geometrically():
    weight = torch.zeros(3, dtype=torch.float64)
    average = WeightAverage([weight], 0.9)
    weight.fill_(1.0)
    for k in range(1, 6):
        average.update()
        torch.testing.assert_close(average.averages[0], torch.full_like(weight, 1 - 0.9**k))
    other = WeightAverage([weight], 0.9)
    other.load(average.averages)
    assert torch.equal(other.averages[0], average.averages[0])
