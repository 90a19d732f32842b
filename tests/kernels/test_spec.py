"""The record that the kernels are compiled for."""

import numpy
import pytest

from jpmhc.kernels import Spec
from jpmhc.kernels.spec import decode


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 3, "d": 8}, "n must be one of 2, 4, 8"),
        ({"n": 4, "d": 12}, "multiple of 8"),
        ({"n": 4, "d": 8, "mixer": "sinkhorn"}, "needs a number of iterations"),
        ({"n": 4, "d": 8, "mixer": "sinkhorn", "iterations": -1}, "iterations must be a whole number and at least 1"),
        ({"n": 4, "d": 8, "temperature": 0.0}, "temperature must be positive"),
        ({"n": 4, "d": 8, "eps": -1.0}, "eps must be positive"),
        ({"n": 4, "d": 8, "scale": float("inf")}, "scale must be a finite number"),
        ({"n": 4, "d": 8, "mixer": "grassmann", "rank": 5}, "rank between 1 and n = 4"),
        ({"n": 4, "d": 8, "mixer": "permutation", "permutations": ((0, 0, 1, 2),)}, "rearrange"),
    ],
)
def test_what_the_kernels_do_not_cover_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Spec(**settings)


def test_key_says_everything() -> None:
    spec = Spec(
        8, 40, norm="rms", eps=1e-5, read="sigmoid", write="softmax_matrix", temperature=0.7, mixer="permutation",
        scale=0.3, iterations=3, rank=2, permutations=((1, 0, 2, 3, 4, 5, 6, 7),), post_norm=True,
    )  # fmt: skip
    assert decode(spec.key) == spec


def test_equal_records_have_equal_keys() -> None:
    one = Spec(4, 8, temperature=2, scale=numpy.float64(0.1), mixer="permutation", permutations=[[0, 1, 2, 3]])
    two = Spec(4, 8, temperature=2.0, scale=0.1, mixer="permutation", permutations=((0, 1, 2, 3),))
    assert one == two
    assert one.key == two.key
    assert hash(one) == hash(two)
