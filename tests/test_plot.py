"""utils/plot.py by value, on small logs whose numbers are worked out by hand."""

import itertools
import json
import sys

import numpy as np
import pytest

from utils import plot as module
from utils.plot import area, band, draw, first_reaching, interquartile_mean, load_runs, name_runs


def make_run(runs, exp_name, seed, returns, final=0.0, selected=None, random=-100.0, expert=100.0, seconds=60.0, finished=True, mixture=None, **changes):
    """A folder as a script leaves it: evaluations at every 10k interactions, each after an iteration without one."""
    args = {"env_id": "A-v0", "seed": seed, "alpha": 0.5, "torch_threads": 1, "exp_name": exp_name, "versions": {"commit": "abc"}, "machine": "here"} | changes
    folder = runs / f"{args['env_id']}__{exp_name}__{seed}__{len(list(runs.glob('*'))) if runs.exists() else 0}"
    folder.mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps(args))
    rows = [("charts/gradient_steps" if exp_name == "bc" else "charts/extra", "charts/timesteps", "charts/seconds", "eval/return")]
    for i, value in enumerate(returns, 1):
        rows += [(0, i * 10000 - 5000, 1.0, ""), (0, i * 10000, seconds, value)]
    (folder / "metrics.csv").write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
    scores = {"final": final, "selected": final if selected is None else selected} | ({} if mixture is None else {"mixture": mixture})
    scores = {
        name: {"timesteps": 1, "return": value, "return_std": 9.0, "length": 1.0, "episodes": changes.get("final_eval_episodes", 10)}
        for name, value in scores.items()
    }
    scores["references"] = {"expert (p_tremble 0.1)": expert, "random policy": random}
    if finished:
        (folder / "scores.json").write_text(json.dumps(scores))
    return folder


@pytest.fixture
def runs(tmp_path):
    """Expert 100, random policy -100 on the average."""
    runs = tmp_path / "runs"
    make_run(runs, "filter_br", 1, [0, 60, 80], final=80, selected=80, random=-90, seconds=600)  # shares 0.5, 0.8, 0.9
    make_run(runs, "filter_br", 2, [60, 60, 60], final=60, selected=60, random=-100, seconds=1200)  # 0.8, 0.8, 0.8
    make_run(runs, "filter_br", 3, [-100, -100, 0], final=0, selected=60, random=-110, seconds=1800)  # 0, 0, 0.5
    make_run(runs, "bc", 1, [1, 2], final=50, selected=60, random=-95)  # 0.8
    make_run(runs, "bc", 2, [1, 2], final=10, selected=20, random=-105)  # 0.6
    return runs


def table_of(runs):
    found, notes = load_runs([runs])
    return module.make_table(name_runs(found), notes)


def test_mazes_are_in_percent(tmp_path):
    """A success returns 1, and the expert's returns 1 too: 7 of 25 is 28."""
    folder = make_run(tmp_path / "runs", "filter_br", 1, [0, 0.28], final=0.28, selected=0.52, random=0.0, expert=1.0)
    scores = json.loads((folder / "scores.json").read_text())
    for what in ("final", "selected"):
        scores[what]["success_percent"] = 100 * scores[what]["return"]
    (folder / "scores.json").write_text(json.dumps(scores))
    (run,), _ = load_runs([tmp_path / "runs"])
    assert run.returns.tolist() == pytest.approx([0, 28]) and run.scores["selected"]["success_percent"] == 52 and run.scores["selected"]["length"] == 1
    table = table_of(tmp_path / "runs")
    assert "| 28 (28%) | 52 (52%) |" in table and "- A-v0: expert (p_tremble 0.1) 100, random policy 0, in percent of successes." in table


# ------------------------------------------------------------------------------------------------------------------------------------------ numbers


def test_interquartile_mean():
    assert interquartile_mean(np.array([100.0, 2, -50, 1, 3])) == 2  # without 100 and -50
    assert interquartile_mean(np.array([9.0, -9, 1, 2, 3, 4, 70, -70])) == 2.5  # without two on each side
    assert interquartile_mean(np.array([1.0, 2, 9])) == 4
    assert interquartile_mean(np.array([[0.0, 5], [1, 6], [2, 7], [99, -99]])).tolist() == [1.5, 5.5]  # over seeds, one by one


def test_band_is_the_bootstrap_interval():
    """Beside the exact distribution: all 5^5 resamples of five seeds. The second point has no spread."""
    returns = np.array([[0.0, 7], [10, 7], [20, 7], [30, 7], [70, 7]])
    exact = [np.sort(returns[list(seeds), 0])[1:4].mean() for seeds in itertools.product(range(5), repeat=5)]
    low, high = band(returns, 4000)
    step = 10 / 3 + 1e-9  # between possible interquartile means
    assert abs(low[0] - np.percentile(exact, 2.5)) <= step and abs(high[0] - np.percentile(exact, 97.5)) <= step
    assert 0 < low[0] < 20 < high[0] < 70 and low[1] == high[1] == 7
    assert np.array_equal(band(returns, 4000), (low, high))


def test_band_of_two_seeds_is_their_range():
    low, high = band(np.array([[1.0, 5], [3, 4]]), 100)
    assert low.tolist() == [1, 4] and high.tolist() == [3, 5]


def test_first_reaching():
    timesteps, shares = np.array([10, 20, 30]), np.array([0.4, 0.8, 0.6])
    assert [first_reaching(timesteps, shares, level) for level in (0.4, 0.5, 0.8, 0.9)] == [10, 20, 20, np.inf]


def test_area():
    assert area(np.array([10, 20]), np.array([1.0, 0.5])) == pytest.approx((10 * 0.5 + 10 * 0.75) / 20)
    assert area(np.array([10, 40]), np.array([-1.0, 1.0])) == pytest.approx((10 * -0.5 + 30 * 0) / 40)  # intervals count by their length
    assert area(np.array([10, 40]), np.array([0.5, 1.0]), cloned=True) == pytest.approx((10 * 0.5 + 30 * 0.75) / 40)


# -------------------------------------------------------------------------------------------------------------------------------------------- table


def test_table_by_value(runs):
    lines = table_of(runs).splitlines()
    header = "| task | algorithm | seeds | interactions | final policy | selected policy | until 50% | until 80% | until 90% | area | minutes |"
    assert lines[0] == header and lines[1] == "|" + " --- |" * 11
    # Area: (0.5833 + 0.6667 + 0.0833) / 3. Until 90 %: one of three got there, so that the median is infinite.
    assert lines[3] == "| A-v0 | filter_br | 3 | 30k | 47 ± 42 (73%) | 67 ± 12 (83%) | 10k (3/3) | 20k (2/3) | - (1/3) | 0.44 | 20.0 |"
    assert lines[2] == "| A-v0 | bc | 2 | 0 | 30 ± 28 (65%) | 40 ± 28 (70%) | 0 (2/2) | - (1/2) | - (0/2) | 0.70 | 1.0 |"
    assert "- A-v0: expert (p_tremble 0.1) 100, random policy -100." in lines and "- Code: abc. Machine: here." in lines


def test_where_an_area_begins(tmp_path):
    """At 0, but for a clone, which is as good before its first evaluation: shares of a half, twice."""
    for cloning_steps, expected in ((5, "0.50"), (0, "0.38")):
        make_run(tmp_path / str(cloning_steps), "filter_br", 1, [0, 0], learner="td3_bc", cloning_steps=cloning_steps)
        assert table_of(tmp_path / str(cloning_steps)).splitlines()[2].split(" | ")[-2] == expected


def test_the_code_that_a_run_was_resumed_with_is_named(runs):
    """And it makes it no other run than its seeds are."""
    make_run(runs, "filter_br", 4, [0, 60, 80], resumed_with=[{"commit": "abd"}, {"commit": "abe"}])
    lines = table_of(runs).splitlines()
    assert lines[3].startswith("| A-v0 | filter_br | 4 |") and "- Code: abc, abd, abe. Machine: here." in lines


def test_the_mixture_has_a_column_where_there_is_one(runs):
    folder = make_run(runs, "nrmm_dual", 1, [0, 0, 0], mixture=50)
    rows = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
    mixture = ["eval/mixture_return", "", "-100", "", "40", "", "60"]  # of the way: 0, 0.7, 0.8
    (folder / "metrics.csv").write_text("".join(",".join([*row, value]) + "\n" for row, value in zip(rows, mixture, strict=True)))
    lines = [line.split(" | ") for line in table_of(runs).splitlines()]
    assert [line[6] for line in lines[:5] if line[0] != "| ---"] == ["mixture", "-", "-", "50 (75%)"] and lines[4][4] == "0 (50%)"
    assert lines[4][7:11] == ["20k (1/1)", "30k (1/1)", "- (0/1)", "0.37"]  # its curve is the mixture's: (0 + 0.35 + 0.75) / 3
    assert any(line[0].startswith("- NRMM's curve") for line in lines)


def test_other_arguments_are_never_averaged(runs):
    make_run(runs, "filter_br", 1, [0, 0, 0], alpha=0)
    make_run(runs, "filter_br", 2, [0, 0, 0], alpha=0, torch_threads=2)
    make_run(runs, "filter_br", 1, [0, 0, 0], alpha=0, env_id="B-v0")
    tasks = name_runs(load_runs([runs])[0])
    counts = {task: {label: len(group) for label, group in groups.items()} for task, groups in tasks.items()}
    assert counts == {"A-v0": {"bc": 2, "filter_br alpha=0.5": 3, "filter_br alpha=0": 2}, "B-v0": {"filter_br alpha=0": 1}}


def test_how_long_a_policy_is_scored_is_no_other_training(runs):
    before = table_of(runs)
    assert "on fresh episodes (10 a run)" in before
    make_run(runs, "filter_br", 4, [0, 60, 80], final=80, final_eval_episodes=100)
    lines = table_of(runs).splitlines()
    assert lines[3].startswith("| A-v0 | filter_br | 4 | 30k | 55 ± ") and any("on fresh episodes (10 or 100 a run)" in line for line in lines)


def test_an_argument_that_a_task_has_to_itself_is_no_difference(runs):
    """Only runs on the same task could be averaged by mistake."""
    make_run(runs, "filter_br", 1, [0, 0, 0], env_id="B-v0", total_timesteps=3)
    assert list(name_runs(load_runs([runs])[0])["B-v0"]) == ["filter_br"]


def test_a_run_from_before_a_flag_was_made_ran_with_its_default(runs):
    make_run(runs, "filter_br", 4, [0, 0, 0], q_weight=2.5)
    make_run(runs, "filter_br", 5, [0, 0, 0], q_weight=0.25)
    make_run(runs, "a_fork", 1, [0, 0, 0], own_flag=1)
    make_run(runs, "a_fork", 1, [0, 0, 0])
    groups = name_runs(load_runs([runs])[0])["A-v0"]
    counts = {label: len(group) for label, group in groups.items()}
    assert counts == {"bc": 2, "filter_br q_weight=2.5": 4, "filter_br q_weight=0.25": 1, "a_fork own_flag=1": 1, "a_fork own_flag=unset": 1}


def test_what_is_left_out_is_said_once(runs):
    make_run(runs, "mmdp", 1, [99], finished=False)  # which has no scores.json, and tables of its own
    before = table_of(runs)
    assert "mmdp" not in before
    stopped = make_run(runs, "filter_br", 4, [99], finished=False)
    make_run(runs, "filter_br", 3, [99], finished=False)  # begun again, and finished then
    again = make_run(runs, "bc", 2, [99, 99], final=99)
    beside = make_run(runs, "filter_br", 3, [99, 99, 99], final=99, torch_threads=2)  # no other run for that
    lines = table_of(runs).splitlines()
    assert [line for line in lines if line.startswith(f"- {beside.name} is left out: ") and "has the same arguments" in line]
    assert f"- {stopped.name} is left out: it is not finished." in lines
    assert [line for line in lines if line.startswith(f"- {again.name} is left out: ") and "has the same arguments" in line]
    assert len([line for line in lines if "left out" in line]) == 3 and lines[:4] == before.splitlines()[:4]


def test_a_folder_that_is_no_run_is_named_and_left_out(runs):
    before = table_of(runs)
    for name, content in (("empty", ""), ("list", "[1]")):
        (runs / name).mkdir()
        (runs / name / "args.json").write_text(content)
    lines = table_of(runs).splitlines()
    assert [line for line in lines if line not in before] == [f"- {name} is left out: its args.json is not a script's." for name in ("empty", "list")]


def test_runs_on_two_devices_are_two_runs(tmp_path):
    """Their random streams differ."""
    for device, value in (("cpu", 0), ("cuda", 50)):
        make_run(tmp_path / "runs", "filter_br", 1, [value], final=value, device=device)
    found, notes = load_runs([tmp_path / "runs"])
    assert [run.returns.tolist() for run in found] == [[0], [50]] and notes == []


def refusal(runs):
    with pytest.raises(SystemExit) as refused:
        table_of(runs)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_refusals(tmp_path, runs, monkeypatch):
    (tmp_path / "empty").mkdir()
    assert "no finished run" in refusal(tmp_path / "empty")
    make_run(tmp_path / "low", "bc", 1, [1], expert=-200)
    assert "A-v0: the expert's return, -200.0, is not above the random policy's, -100.0" in refusal(tmp_path / "low")
    make_run(tmp_path / "grid", "filter_br", 1, [1, 2])
    make_run(tmp_path / "grid", "filter_br", 2, [1])
    assert "A-v0, filter_br: " in (said := refusal(tmp_path / "grid")) and "evaluations at other interactions" in said
    make_run(runs, "filter_nr", 1, [0, 0, 0], expert=101)
    assert "A-v0: " in (said := refusal(runs)) and "different experts" in said
    monkeypatch.setattr(sys, "argv", ["plot.py", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="nowhere is no folder"):
        module.main()
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------------------------------------------------- figure


def test_figure(runs, tmp_path, monkeypatch):
    """What is drawn are the interquartile means, their bands and the flat lines."""
    from matplotlib.figure import Figure

    for seed, value in ((4, 20.0), (5, 1000.0)):
        make_run(runs, "filter_br", seed, [value] * 3)
    make_run(runs, "filter_nr", 1, [0, 1, 2], env_id="B-v0")
    drawn, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *rest, **options: drawn.append(figure) or savefig(figure, *rest, **options))
    draw(name_runs(load_runs([runs])[0]), 100, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG") and [path.name for path in tmp_path.glob("curves*")] == ["curves.png"]
    a, b = drawn[0].axes
    lines = {line.get_label(): line for line in a.lines}
    assert (a.get_title(), b.get_title()) == ("A-v0", "B-v0") and a.get_xlabel() == "interactions used for policy optimisation"
    assert lines["filter_br"].get_xdata().tolist() == [10000, 20000, 30000]
    np.testing.assert_allclose(lines["filter_br"].get_ydata(), [(0 + 20 + 60) / 3, (20 + 60 + 60) / 3, (20 + 60 + 80) / 3])
    low, high = band(np.array([[0, 60, 80], [60, 60, 60], [-100, -100, 0], [20] * 3, [1000] * 3]), 100)
    edges = a.collections[0].get_paths()[0].vertices[:, 1]
    assert edges.min() == low.min() and edges.max() == high.max()
    assert [list(lines[name].get_ydata()) for name in ("bc", "expert (p_tremble 0.1)", "random policy")] == [[40, 40], [100, 100], [-100, -100]]
    labels = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert labels == ["bc", "filter_br", "expert (p_tremble 0.1)", "random policy", "filter_nr"]


def test_command_line(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plot.py", str(runs), "--out", str(tmp_path / "out"), "--n-resamples", "50"])
    module.main()
    assert capsys.readouterr().out == (tmp_path / "out" / "table.md").read_text()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"table.md", "learning_curves.png"}
