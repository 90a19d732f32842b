"""One step: a state that is not finite is reported with step, rows and what was saved, whatever the connections."""

import math

import pytest
import torch

import jpmhc
from jpmhc.experiments.training import checkpoint
from jpmhc.experiments.training.learner import Learner, NonFiniteLoss
from jpmhc.experiments.training.loop import train
from tests.experiments.training.small_run import small, trained


@pytest.mark.parametrize("form", ["exact", "paper"])
@pytest.mark.parametrize("mixer", list(jpmhc.MIXERS))
def test_every_mixer_reports_a_diverged_run_alike(tmp_path, mixer, form):
    """The message names the step, the mixer and the rows; no mixer refuses its own NaN before that."""
    model = {"mixer": mixer, "streams": 4, "mixer_form": form}
    message = rf"^the loss of step 2 with mixer {mixer} is nan, on 8 rows of .+; the state before this step is in .*"
    with pytest.raises(NonFiniteLoss, match=message):
        train(small(tmp_path, lr=1e30, warmup=0, model=model))
    saved = checkpoint.verify_checkpoint(tmp_path / "failed" / "checkpoints" / "step-00000001")
    assert saved.rank(0)["carry"]["inputs"].shape == (8, 16)


def test_only_the_rows_that_are_not_finite_are_counted(tmp_path, monkeypatch):
    advance = Learner.take_step

    def poisoned(state, *arguments, **options):
        if state.step == 1:
            state.carries[0].halted[2:] = False
            state.carries[0].halted[:2] = True  # begin anew, so that nothing of their poisoned state is left
            state.carries[0].z_h[0] = state.carries[0].z_h[5] = math.inf
        return advance(state, *arguments, **options)

    monkeypatch.setattr(Learner, "take_step", poisoned)
    with pytest.raises(NonFiniteLoss, match=r"^the loss of step 2 with mixer cayley is nan, on 1 rows of "):
        train(small(tmp_path, model={"mixer": "cayley", "streams": 2}))
    assert not torch.isfinite(
        checkpoint.verify_checkpoint(tmp_path / "failed" / "checkpoints" / "step-00000001").rank(0)["carry"]["z_h"][5]
    ).any()


@pytest.mark.parametrize("mixer", ["identity", "cayley"])
def test_weights_spoilt_by_the_last_step_are_found_by_its_evaluation(tmp_path, mixer):
    with pytest.raises(NonFiniteLoss, match=r"^after step 1 the model answers .* not finite; .*step-00000001$"):
        train(small(tmp_path, steps=1, lr=1e30, warmup=0, model={"mixer": mixer, "streams": 2}))


def test_averages_decay_by_the_rate_of_the_run(tmp_path):
    learner = trained(small(tmp_path, steps=2, ema=0.75)).learner
    before = [average.clone() for average in learner.averages]
    for tensor, average in zip(learner.distributed.tensors(), learner.averages):
        tensor.copy_(average + 4.0)
    learner.update_averages(learner.averages, learner.distributed.tensors(), None)
    for average, former in zip(learner.averages, before):
        torch.testing.assert_close(average, former + 1.0)
