"""`jpmhc diagnose`: a model of one's own, a Hugging Face folder, and what is said of wrong names."""

import csv
import sys

import pytest
import torch

import jpmhc
from jpmhc import cli
from tests.cli.running import fails_with

MODEL = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), torch.randn(2, 8)

def wrong():
    return 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_model.py"
    path.write_text(MODEL)
    return path


def test_a_model_of_ones_own(file, tmp_path, capsys):
    out = tmp_path / "out"
    cli.main(["diagnose", f"{file}:build", "--out", str(out), "--between", "None", "1"])
    said, progress = capsys.readouterr()
    assert "plan: from the model's input to the output of 1" in said
    assert progress.endswith("\neverything measured: 100%\n")
    assert "1. " in said
    assert "5. Theory" in said
    for name in ("diagnosis.png", "diagnosis.html", "diagnosis.txt", "singular_values.csv"):
        assert f"wrote {out / name}" in said
        assert (out / name).stat().st_size > 100
    rows = list(csv.DictReader((out / "singular_values.csv").open()))
    whole = [float(row["singular_value"]) for row in rows if row["map"] == "whole map"]
    assert len(whole) == 16
    assert whole == sorted(whole)


def test_a_hugging_face_folder(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=30
    )
    transformers.LlamaModel(config).save_pretrained(tmp_path / "llama")
    cli.main(["diagnose", str(tmp_path / "llama"), "--length", "4", "--out", str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert "from the embeddings (embed_tokens; the inputs are integers) to the model's output" in said
    assert "64 x 64" in said


def test_a_folder_of_a_wrapped_model(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=30
    )
    jpmhc.wrap(transformers.LlamaModel(config)).save_pretrained(tmp_path / "wrapped")
    cli.main(["diagnose", str(tmp_path / "wrapped"), "--length", "4", "--out", str(tmp_path / "out")])
    assert "layers.1.hyper_connections.additions.1" in capsys.readouterr().out


def test_a_file_may_import_its_neighbours(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_model.py").write_text(MODEL)
    (tmp_path / "main_model.py").write_text("from neighbour_of_model import build")
    cli.main(["diagnose", f"{tmp_path / 'main_model.py'}:build", "--out", str(tmp_path / "out")])
    assert "16 x 16" in capsys.readouterr().out


def test_a_run_of_training(tmp_path, capsys):
    options = ["--steps", "1", "--batch", "4", "--task.test-puzzles", "4", "--task.puzzles", "8"]
    cli.main(["train", "--preset", "laptop", "--out", str(tmp_path / "run"), *options])
    cli.main(["diagnose", str(tmp_path / "run"), "--tokens", "1", "--out", str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert "from the output of network to the output of token_head" in said
    assert "network.0 (call " in said


def test_wrong_names_are_one_sentence(file, tmp_path, capsys):
    out = ["--out", str(tmp_path / "out")]
    fails_with(capsys, "there is no file nowhere.py", "diagnose", "nowhere.py:build", *out)
    fails_with(capsys, "there is no module nowhere; a file is named", "diagnose", "nowhere:build", *out)
    fails_with(capsys, "--text is for Hugging Face models", "diagnose", f"{file}:build", "--text", "hello", *out)
    fails_with(capsys, "--length is for Hugging Face models", "diagnose", f"{file}:build", "--length", "3", *out)
    fails_with(capsys, "has no function biuld", "diagnose", f"{file}:biuld", *out)
    fails_with(capsys, "must return a model and its inputs", "diagnose", f"{file}:wrong", *out)
    fails_with(capsys, "lacks the name of a function that makes the model", "diagnose", str(file), *out)
    fails_with(capsys, "there is no folder /no/such/folder", "diagnose", "/no/such/folder", *out)
    fails_with(capsys, "no module 'norm' of this model", "diagnose", f"{file}:build", "--between", "0", "norm", *out)
