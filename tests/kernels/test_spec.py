"""The record that the kernels are compiled for."""

import pytest

from jpmhc.kernels import Spec
from jpmhc.kernels.spec import decode


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 3, "d": 8}, "n must be one of 2, 4, 8"),
        ({"n": 4, "d": 12}, "multiple of 8"),
        ({"n": 4, "d": 8, "mixer": "sinkhorn"}, "positive number of iterations"),
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
