"""The user's number of threads is restored after small matrices, and a container's memory is not overestimated."""

import dataclasses

import pytest
import torch

from jpmhc import machine
from jpmhc.experiments.training import loop
from jpmhc.experiments.training.presets import PRESETS
from jpmhc.machine import use_threads
from jpmhc.spectra import Network, cauchy


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_one_thread_inside_and_the_users_number_after(two_threads):
    with use_threads(1):
        assert torch.get_num_threads() == 1
        with use_threads(1):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_an_error_inside_gives_the_threads_back(two_threads):
    tied = Network(torch.eye(2).repeat(2, 1, 1), 0.1, tied=[0, 0])
    with pytest.raises(ValueError, match="weights of their own"):
        cauchy(tied, torch.tensor([1 + 1j]), matrix=True)
    assert torch.get_num_threads() == 2


def test_none_leaves_the_threads_as_they_are(two_threads):
    with use_threads(None):
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("limit", "free"), [("max", None), ("5000", 3100), ("99999999999999999", None)])
def test_the_limit_of_a_container_is_kept_to(monkeypatch, tmp_path, limit, free):
    cpu = torch.device("cpu")
    monkeypatch.setattr(machine, "_CONTAINER", tmp_path)
    whole = machine.free_memory(cpu)
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("2000\n")
    (tmp_path / "memory.stat").write_text("anon 1900\ninactive_file 100\nactive_file 7\n")
    assert machine.free_memory(cpu) == pytest.approx(whole if free is None else free, rel=0.2 if free is None else 0)


def test_the_laptop_preset_trains_with_one_thread(two_threads, monkeypatch, tmp_path):
    class Recorder:
        def __init__(self, *arguments):
            pass

        def run(self):
            return torch.get_num_threads()

    monkeypatch.setattr(loop, "Trainer", Recorder)
    assert loop.train(dataclasses.replace(PRESETS["laptop"], out=tmp_path / "run")) == 1
    assert loop.train(dataclasses.replace(PRESETS["laptop"], threads=None, out=tmp_path / "run")) == 2
    assert torch.get_num_threads() == 2
