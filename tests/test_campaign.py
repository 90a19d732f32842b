"""The campaign's runner: rounds depend on seed and number, records are gone on with, and a failure is a failure."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.campaign import __main__ as campaign
from tests.campaign import full_disks, hostile_matrices, hostile_tasks, transformers_suites
from tests.campaign.groups import GROUPS
from tests.campaign.tally import Tally


@pytest.fixture
def drawn(monkeypatch):
    """The numbers that a group of its own draws; its attacks fail where a number ends in 7."""
    numbers = []

    def run(rng, size):
        tally = Tally()
        for number in rng.integers(1000, size=size):
            numbers.append(int(number))
            tally.fail(f"drew {number}") if number % 10 == 7 else tally.hold()
        return tally

    monkeypatch.setitem(GROUPS, "drawing", "drawing")
    monkeypatch.setitem(sys.modules, "drawing", SimpleNamespace(run=run, ROUND=5))
    return numbers


def test_failures_are_counted_and_named_with_their_round(drawn, capsys):
    made = campaign.run_group("drawing", 0, 0.0, 50, None, None)
    failed = [place for place, number in enumerate(drawn) if number % 10 == 7]
    assert (made.tried, made.held, made.failed) == (50, 50 - len(failed), len(failed))
    assert made.messages == [f"drawing, seed 0, round {place // 5}: drew {drawn[place]}" for place in failed]
    assert failed
    again = list(drawn)
    drawn.clear()
    campaign.run_group("drawing", 0, 0.0, 5, None, 3)
    assert drawn == again[15:20]


def test_a_recorded_campaign_is_gone_on_with(drawn, tmp_path):
    first = campaign.run_group("drawing", 0, 0.0, 20, tmp_path / "rounds", None)
    both = campaign.run_group("drawing", 0, 0.0, 30, tmp_path / "rounds", None)
    assert len(drawn) == both.tried == 30
    assert both.messages[: first.failed] == first.messages


def test_a_round_that_does_not_end_is_a_failure_and_the_next_is_made(drawn, monkeypatch):
    short = sys.modules["drawing"].run

    def run(rng, size):
        if not drawn:
            drawn.append(0)
            time.sleep(60)
        return short(rng, 1)

    monkeypatch.setattr(sys.modules["drawing"], "run", run)
    made = campaign.run_group("drawing", 0, 0.0, 3, None, None, limit=1)
    assert (made.tried, len(drawn)) == (3, 3)
    assert made.messages[0] == "drawing, seed 0, round 0: not ended after 1 s"


def test_processes_make_the_rounds_of_one(drawn):
    campaign.run_group("drawing", 0, 0.0, 30, None, None)
    alone, lanes = list(drawn), []
    for lane in range(2):
        drawn.clear()
        campaign.run_group("drawing", 0, 0.0, 15, None, None, lane=lane, lanes=2)
        lanes.append(np.reshape(drawn, (3, 5)))
    assert np.stack(lanes, 1).flatten().tolist() == alone


@pytest.mark.parametrize(("tries", "status"), [("5", 0), ("50", 1)])
def test_the_table_and_the_status_say_what_failed(drawn, monkeypatch, capsys, tries, status):
    monkeypatch.setattr(campaign, "run_apart", lambda name, processes, *others: campaign.run_group(name, *others))
    monkeypatch.setattr(sys, "argv", ["campaign", "--groups", "drawing", "--tries", tries])
    with pytest.raises(SystemExit) as ended:
        campaign.main()
    failed = sum(number % 10 == 7 for number in drawn)
    assert capsys.readouterr().out.split()[5:9] == ["drawing", tries, str(int(tries) - failed), str(failed)]
    assert ended.value.code == status == (failed > 0)


@pytest.mark.parametrize("group", [hostile_tasks, hostile_matrices])
def test_some_hostile_files_are_withstood(group):
    made = group.run(np.random.default_rng(7), 60)
    assert (made.tried, made.messages) == (60, [])


def test_a_full_disk_is_withstood(tmp_path):
    """In a process of its own, which has not used autograd when it forks; the campaign tries all commands."""
    script = f"""
import numpy as np
from pathlib import Path
from tests.campaign import full_disks

rng, folder = np.random.default_rng(0), Path({str(tmp_path)!r})
print(full_disks.make_workspace(folder / "whole"))
for number, name in enumerate(["train", "evaluate", "import-trm"]):
    print(*full_disks.fill_disk(rng, folder / "whole", folder / str(number), name), sep=": ")
"""
    root = Path(__file__).parents[1]
    ended = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    lines = [line for line in ended.stdout.splitlines() if line.endswith("None")]
    assert len(lines) == 4, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("after", "fault"),
    [
        ({"a.json": b"[1]", "log.jsonl": b"{}\n"}, None),
        ({"a.json": b"[2]", "log.jsonl": b"{}\n{}\n"}, None),
        ({"log.jsonl": b"{}\n"}, "a.json is gone"),
        ({"a.json": b"[1", "log.jsonl": b"{}\n"}, "a.json is not whole"),
        ({"a.json": b"[12345]", "log.jsonl": b"{}\n"}, "beyond the limit of 5"),
        ({"a.json": b"[1]", "log.jsonl": b""}, "log.jsonl has lost lines"),
        ({"a.json": b"[1]", "log.jsonl": b"{}\n", ".a.json.7.new": b""}, "was left behind"),
    ],
)
def test_a_file_that_is_written_over_is_noticed(after, fault):
    before = {Path("a.json"): b"[1]", Path("log.jsonl"): b"{}\n"}
    said = "jpmhc: cannot write\n"
    noticed = full_disks.find_fault(2, said, before, {Path(name): content for name, content in after.items()}, 5)
    assert (noticed is None) if fault is None else fault in noticed
    assert "ended with 0 sentences" in full_disks.find_fault(2, "", before, before, 5)
    assert "ended with 1" in full_disks.find_fault(1, "Traceback", before, before, 5)


SUITE = """
import transformers
# The plugin wraps models of the classes that are loaded.
from transformers import GPT2Model, LlamaForSequenceClassification, WhisperModel

class TestTiny:
    def make(self):
        return GPT2Model(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=32)).eval()

    def test_saving(self, tmp_path):
        self.make().save_pretrained(tmp_path)
        model = GPT2Model.from_pretrained(tmp_path)
        assert model.h[0].ln_1.weight.numel() == 8

    def test_blocks_have_these_children(self):
        assert len(list(self.make().h[0].children())) == 4

    def test_that_fails_plain_too(self):
        self.make().h[0](0)

    def test_fewer_layers(self):
        model = self.make()
        if hasattr(model.h[0], "hyper_connections"):
            raise RuntimeError("GPT2Model did not call all of its layers h.0 to h.1")

    def test_an_error_inside_wrap(self):
        from jpmhc.wrap.layers import replace_entries

        if hasattr(self.make().h[0], "hyper_connections"):
            replace_entries(())

    def test_feed_forward_chunking(self):
        assert len(list(self.make().h[0].children())) == 4

    def test_without_a_model(self):
        assert transformers.GPT2Config(n_layer=1).n_layer == 1

    def test_a_head_that_inherits_its_constructor(self):
        sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
        config = transformers.LlamaConfig(**sizes, pad_token_id=0)
        LlamaForSequenceClassification(config)
        changed = bool(getattr(config, "fusion_config", None))
        assert not changed  # a body that is wrapped alone changes its configuration

    def test_speech(self):
        sizes = dict(d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, vocab_size=64)
        sizes |= dict(decoder_attention_heads=2, max_source_positions=6, pad_token_id=0, decoder_start_token_id=1)
        model = WhisperModel(transformers.WhisperConfig(**sizes))
        assert not any("hyper_connections" in name for name, _ in model.named_parameters())
"""


def test_a_test_that_passes_plain_and_fails_wrapped_is_counted(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="the campaign's group transformers needs it")
    file = tmp_path / "tests" / "models" / "tiny" / "test_modeling_tiny.py"
    file.parent.mkdir(parents=True)
    file.write_text(SUITE)
    tally = Tally()
    transformers_suites.compare(file, tally)
    assert (tally.tried, tally.held) == (7, 4), tally
    assert [message.partition(": ")[0].rpartition("::")[2] for message in tally.messages] == [
        "test_blocks_have_these_children",
        "test_an_error_inside_wrap",
        "test_speech",
    ]
    assert "assert 5 == 4" in tally.messages[0]
    assert "TypeError" in tally.messages[1]
    monkeypatch.setattr(transformers_suites, "tests", "saving or fewer")
    transformers_suites.compare(file, chosen := Tally())
    assert (chosen.tried, chosen.held) == (2, 2), chosen
