"""The page of runs: what the folders hold is on it, hostile text is harmless, long runs stay small."""

import json
import re

import numpy as np
import pytest

from jpmhc.report.page import LARGEST, write_page
from jpmhc.report.run_page import draw_logged, find_rates, group_runs, render_runs
from jpmhc.report.run_record import read_run
from jpmhc.report.style import colour_of
from tests.report.run_folders import write_run, write_votes


def captions(page):
    return re.findall(r"<figcaption>(.*?)</figcaption>", page)


def test_everything_that_a_run_logged_is_on_its_page(tmp_path):
    page = render_runs([read_run(write_run(tmp_path / "one"))])
    assert captions(page) == [
        "training loss",
        "training rows solved exactly",
        "training tokens right",
        "gradient norm",
        "throughput",
        "learning rate",
        "gradient norm by layer",
        "test loss",
        "test rows solved exactly",
        "test tokens right",
        "product of all skips over depth",
        "distance of the skips to I",
        "violation of the set",
        "lost by the product of all skips",
        "network.connections.0",
    ]
    for text in ("20 of 20", "25.0%", "abc123", ">jpmhc train --seed 7<", "model.dim = 64", "0.75", "1.0e-07"):
        assert text in page, text
    assert "<script" not in page
    assert "default-src 'none'" in page
    assert all(address.startswith("#") for address in re.findall(r"(?:src|href)=.(.)", page))  # nothing is loaded


def test_seeds_are_one_line_with_its_spread(tmp_path):
    runs = [
        read_run(write_run(tmp_path / f"{mixer}-{seed}", mixer=mixer, seed=seed))
        for mixer in ("cayley", "sinkhorn")
        for seed in (0, 2)
    ]
    groups = group_runs(runs)
    assert [group.name for group in groups] == ["cayley, 2 streams, 2 seeds", "sinkhorn, 2 streams, 2 seeds"]
    assert [group.colour for group in groups] == [colour_of("cayley"), colour_of("sinkhorn")]
    line = groups[0].line(lambda run: run.series("train", "loss"))
    assert line.y[0] == pytest.approx(2 + 1)
    assert (line.low[0], line.high[0]) == (2, 4)
    page = render_runs(runs)
    # the last losses are 0.1 and 2.1: mean 1.1, standard deviation √2
    assert "1.1 ± 1" in page
    assert page.count('<g class="band"') > 4


def test_other_options_tell_runs_of_one_mixer_apart(tmp_path):
    runs = [read_run(write_run(tmp_path / str(rate), lr=rate)) for rate in (0.5, 0.25)]
    groups = group_runs(runs)
    assert [group.name for group in groups] == ["cayley, 2 streams, lr 0.5", "cayley, 2 streams, lr 0.25"]
    assert groups[0].colour == groups[1].colour
    assert groups[0].dashes != groups[1].dashes
    assert "Options that differ" in render_runs(runs)


def test_a_base_rate_that_a_resumption_changed_is_that_of_its_steps(tmp_path):
    folder = write_run(tmp_path / "one")
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    change = {"name": "lr", "there": 0.5, "here": 0.001}
    lines.append({"kind": "resume", "step": 10, "checkpoint": "step-10", "changes": [change]})
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(folder)
    steps, rates = find_rates(run)
    factors = run.series("train", "rate")[1]
    assert len(steps) > 2
    for step, rate, factor in zip(steps, rates, factors):
        assert rate == pytest.approx(factor * (0.5 if step <= 10 else run.config["lr"]))


def test_rows_that_did_not_halt_are_no_measurement(tmp_path):
    groups = group_runs([read_run(write_run(tmp_path / "one"))])
    charts = {chart.title: chart for chart in draw_logged(groups, "train")}
    assert set(charts["training rows solved exactly"].lines[0].y) == {0.5}  # and not 0 at every other step


def test_answers_are_grids_with_votes(tmp_path):
    run = write_run(tmp_path / "one")
    candidates = [{"grid": [[1, 2]], "votes": 7, "of": 9}, {"grid": [[1], [2]], "votes": 2, "of": 9}]
    tests = [{"task": "00d62c1b", "test": 0, "input": [[3]], "output": [[1, 4]], "candidates": candidates}]
    write_votes(run, [*tests, {"task": "broken"}])
    page = render_runs([read_run(run)])
    assert "task 00d62c1b, test 1" in page
    assert "first attempt, 7 of 9 votes: 1 of 2 cells wrong" in page
    assert "second attempt, 2 of 9 votes: 2 × 1, wrong size" in page
    assert "1 tests of step-00000020.votes.json are damaged, and were left out" in page


def test_many_large_answers_stay_below_the_limit(tmp_path):
    run = write_run(tmp_path / "one")
    busy = np.random.default_rng(0).integers(0, 10, (30, 30)).tolist()
    candidates = [{"grid": busy, "votes": 1, "of": 2}] * 2
    write_votes(
        run, [{"task": str(k), "test": 0, "input": busy, "output": busy, "candidates": candidates} for k in range(120)]
    )
    page = render_runs([read_run(run)])
    assert 200_000 < len(page.encode()) < LARGEST
    assert re.search(r"Shown are \d+ of 120 tests", page)


def test_hostile_text_is_escaped(tmp_path):
    evil = "</pre><script>alert(1)</script>"
    run = write_run(tmp_path / "<img src=x onerror=alert(2)>", mixer=evil, note=evil)
    log = (run / "log.jsonl").read_text().replace("network.connections.0", "<svg onload=alert(3)>")
    (run / "log.jsonl").write_text(log.replace("/home/me/bin/jpmhc train --seed 7", evil.replace("/", "\\/")))
    page = render_runs([read_run(run)])
    assert "&lt;script&gt;alert(1)" in page
    for tag in ("<script", "<img", "<svg onload"):
        assert tag not in page


def test_long_runs_are_thinned(tmp_path):
    runs = [read_run(write_run(tmp_path / str(seed), steps=10_000 if seed else 2000, seed=seed)) for seed in range(2)]
    assert len(render_runs(runs).encode()) < 400_000


@pytest.mark.parametrize("value", [10**400, None, [[]], {"a": 1}, "\ud800"])
def test_values_that_are_no_numbers_leave_gaps(tmp_path, value):
    """Numbers without end, wrong kinds and halves of characters, at every place of a log in turn."""
    run = write_run(tmp_path / "run", steps=3)
    whole = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    for name in {name for line in whole for name in line} - {"kind", "step"}:
        damaged = [{**line, name: value} if name in line else line for line in whole]
        (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in damaged))
        write_page(render_runs([read_run(run)]), tmp_path / "page.html")
    (run / "log.jsonl").write_text(json.dumps({**whole[1], "step": value}))
    refused(run, "line 1 has no kind or no step")


def test_losses_that_are_not_finite_are_said(tmp_path):
    run = write_run(tmp_path / "one", loss=lambda step: "nan" if step == 3 else 1.0)
    assert "1 values are not finite: gaps." in render_runs([read_run(run)])


def refused(folder, pattern):
    with pytest.raises(ValueError, match=pattern) as caught:
        read_run(folder)
    assert "\n" not in str(caught.value)


def test_folders_that_are_no_runs_are_refused_in_one_sentence(tmp_path):
    refused(tmp_path / "none", "there is no folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "is empty: it has no config.json")
    (tmp_path / "compared").mkdir()
    (tmp_path / "compared" / "comparison.json").touch()
    refused(tmp_path / "compared", r"comparison of jpmhc compare, whose page is .*comparison\.html")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").touch()
    refused(tmp_path / "other", "is not the folder of a run")
    run = write_run(tmp_path / "run")
    whole = (run / "config.json").read_text()
    (run / "config.json").write_text(whole[:50])
    refused(run, "config.json is not a JSON file")
    (run / "config.json").write_text(json.dumps({"version": 2}))
    refused(run, "this version cannot read .*: it lacks model")
    (run / "config.json").write_text(whole)
    (run / "log.jsonl").write_text('{"time": 3}\n')
    refused(run, "not a log that this version reads: line 1 has no kind")
    (run / "log.jsonl").unlink()
    refused(run, "the run has logged no step yet")


def test_a_half_written_last_line_is_left_out_and_said(tmp_path):
    run = write_run(tmp_path / "run")
    with (run / "log.jsonl").open("a") as file:
        file.write('{"kind": "tra')
    assert "the last line is half written, and was left out" in render_runs([read_run(run)])


def test_damaged_lines_of_a_log_cost_those_lines(tmp_path):
    run = write_run(tmp_path / "run")
    whole = read_run(run).lines
    lines = (run / "log.jsonl").read_text().splitlines()
    lines[1], lines[3] = lines[1] + "}", "[" * 2000
    (run / "log.jsonl").write_text("\n".join(lines) + "\n")
    found = read_run(run)
    assert found.lines == [whole[0], whole[2], *whole[4:]]
    page = render_runs([found])
    assert "line 2 of the log is damaged, and was left out" in page
    assert "line 4 of the log is damaged, and was left out" in page
