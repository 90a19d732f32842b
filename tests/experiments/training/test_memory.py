"""The estimate of memory against the tensors that autograd keeps, and the refusal before anything is made."""

import dataclasses

import pytest
import torch

from jpmhc.cli import main
from jpmhc.experiments.training import memory
from jpmhc.experiments.training.learner import Learner
from jpmhc.experiments.training.processes import World
from tests.experiments.training.small_run import small

CPU = World(0, 1, torch.device("cpu"))


def kept_bytes(learner: Learner) -> int:
    """Bytes that one step's graph keeps, besides the weights."""
    storages = {}
    own = {p.untyped_storage().data_ptr() for p in (*learner.core.parameters(), *learner.core.buffers())}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage  # kept, so that no other tensor gets its address
        return tensor

    rows = learner.task.examples(torch.arange(learner.config.batch).numpy())
    puzzle = learner.model.puzzles(rows.identifiers)
    carry = learner.carries[0]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        learner.core(
            puzzle, rows.inputs, rows.labels, carry.z_h, carry.z_l, carry.steps, carry.halted, torch.zeros(len(rows))
        )
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"between_positions": "mlp"},
        {"mixer": "cayley", "streams": 4},
        {"mixer": "sinkhorn", "streams": 4, "stream_span": "recursion"},
        {"compute": "bfloat16", "mixer": "cayley", "streams": 2},
    ],
)
def test_the_estimate_is_a_lower_bound_and_not_a_loose_one(tmp_path, model):
    config = small(tmp_path, model={"dim": 32, "inner_multiple": 32, "l_cycles": 3, **model})
    task = config.task.build()
    measured = kept_bytes(Learner(config, CPU, task))
    estimate = config.batch * memory.activation_bytes(config, task)
    assert 0.2 * measured < estimate <= measured


def test_weights_and_optimiser_are_counted(tmp_path):
    config = small(tmp_path)
    task = config.task.build()
    weights = sum(p.numel() for p in Learner(config, CPU, task).core.parameters())
    assert memory.state_bytes(config, task) == 4 * (5 * weights + config.model.dim)


def test_a_batch_that_does_not_fit_is_refused_with_the_parts_that_do(tmp_path, monkeypatch):
    config = small(tmp_path)
    task = config.task.build()
    fixed, row = memory.state_bytes(config, task), memory.activation_bytes(config, task)
    monkeypatch.setattr(memory, "free_memory", lambda device: fixed + 3 * row)
    with pytest.raises(ValueError, match=r"8 rows at a time, and .* --accumulate 4 works on 2 rows at a time, or take"):
        memory.refuse_memory(config, task, CPU)
    memory.refuse_memory(dataclasses.replace(config, accumulate=4), task, CPU)
    monkeypatch.setattr(memory, "free_memory", lambda device: fixed)
    with pytest.raises(ValueError, match=r"free on this cpu: take a smaller batch or model$"):
        memory.refuse_memory(config, task, CPU)


def test_the_preset_of_the_paper_is_refused_on_a_small_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(memory, "free_memory", lambda device: 20 * 2**30)
    words = ["--task.tasks", "25d8a9c8", "--task.test-on", "training", "--task.augmentations", "3"]
    options = [*words, "--device", "cpu", "--out", str(tmp_path / "run")]
    with pytest.raises(SystemExit):
        main(["train", "--preset", "paper", *options])
    assert "GiB for 768 rows at a time, and 20.0 GiB are free on this cpu: --accumulate" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
