"""Learning curves and the table of finished runs.

    python utils/plot.py runs/ --out FOLDER      writes FOLDER/learning_curves.png and FOLDER/table.md

It reads args.json, metrics.csv and scores.json of the runs that stand directly in the given folders, and from algos/ the defaults of flags that a run does
not know.

Curves are interquartile means over seeds of the true return, in bands of 95 % bootstrap confidence. Shares count from the random policy (0 %) to the expert
(100 %), means over a task's runs, both in the environment that the policies are evaluated in, but where the expert's name has another p_tremble: demonstrations
that come without their expert's return are worth what they were recorded at.
"""

import csv
import functools
import importlib
import json
import math
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tyro
from scipy.stats import bootstrap, trim_mean

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
LEVELS = (0.5, 0.8, 0.9)
NOT_COMPARED = ("env_id", "seed", "resume", "eval", "capture_video", "final_eval_episodes", "device", "torch_threads")
NOT_COMPARED += ("exp_name", "versions", "resumed_with", "machine")


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """folders that hold folders of runs"""
    out: Path
    """folder for the figure and the table"""
    n_resamples: int = 2000
    """bootstrap resamples of the seeds"""


@dataclass
class Run:
    folder: Path
    args: dict
    scores: dict
    timesteps: np.ndarray
    """(n,) interactions used for policy optimisation at the evaluations; none in behavioural cloning"""
    returns: np.ndarray
    """(n,) true returns there, of the policy or, in NRMM, of the mixture of policies; in the mazes, percent of successes"""
    seconds: float
    """wall time"""


# ========================================================================================================================================= logs


def load_runs(folders):
    """The finished runs in `folders`, and notes on what was left out."""
    finished, interrupted, notes = {}, [], []
    for path in sorted(path for folder in folders for path in folder.glob("*/args.json")):
        try:
            args = dict(json.loads(path.read_text()))
        except (ValueError, TypeError):
            notes.append(f"{path.parent.name} is left out: its args.json is not a script's.")
            continue
        if args.get("exp_name", "mmdp") == "mmdp":  # an expert's training, or MMDP, which has tables of its own
            continue
        args = defaults(args["exp_name"], args["env_id"]) | args
        known = json.dumps({name: args[name] for name in args if name not in NOT_COMPARED or name in ("env_id", "seed", "exp_name", "device")}, sort_keys=True)
        if not (path.parent / "scores.json").exists():
            interrupted.append((known, path.parent))
        elif known in finished:
            notes.append(f"{path.parent.name} is left out: {finished[known].folder.name} has the same arguments.")
        else:
            finished[known] = load_run(path.parent, args)
    notes += [f"{folder.name} is left out: it is not finished." for known, folder in interrupted if known not in finished]
    if not finished:
        raise SystemExit(f"{', '.join(map(str, folders))}: no finished run (with args.json, metrics.csv and scores.json) stands directly in it")
    return list(finished.values()), notes


@functools.cache
def defaults(exp_name, env_id):
    """What the script's flags are when left out: so ran a run from before one of them was made, since a new flag's default keeps what was."""
    if not (ROOT / "algos" / f"{exp_name}.py").exists():
        return {}
    return asdict(importlib.import_module(f"algos.{exp_name}").Args(env_id=env_id))


def load_run(folder, args):
    scores = json.loads((folder / "scores.json").read_text())
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    evaluations = [] if "charts/gradient_steps" in rows[0] else [row for row in rows if row["eval/return"]]
    returned = "eval/mixture_return" if "eval/mixture_return" in rows[0] else "eval/return"
    timesteps, returns = (np.array([float(row[name]) for row in evaluations]) for name in ("charts/timesteps", returned))
    if in_percent(scores):  # in the mazes a success returns 1
        returns *= 100
        for what, values in scores.items():
            values |= {name: 100 * values[name] for name in (values if what == "references" else ("return", "return_std"))}
    return Run(folder, args, scores, timesteps, returns, float(rows[-1]["charts/seconds"]))


def in_percent(scores):
    return "success_percent" in scores["selected"]


def name_runs(runs):
    """{task: {label: its runs by seed}}. Runs of one script on one task with other arguments than the seed are never averaged: their labels tell them apart."""
    differing = {}
    for run in runs:
        for other in runs:
            if all(run.args[name] == other.args[name] for name in ("exp_name", "env_id")):
                names = [name for name in {**run.args, **other.args} if run.args.get(name) != other.args.get(name) and name not in NOT_COMPARED]
                differing.setdefault(run.args["exp_name"], {}).update(dict.fromkeys(names))
    tasks = {}
    for run in sorted(runs, key=lambda run: (run.args["env_id"], run.args["exp_name"], run.args["seed"])):
        label = " ".join([run.args["exp_name"], *(f"{name}={run.args.get(name, 'unset')}" for name in differing[run.args["exp_name"]])])
        tasks.setdefault(run.args["env_id"], {}).setdefault(label, []).append(run)
    for task, groups in tasks.items():
        for label, group in groups.items():
            if other := [run for run in group if not np.array_equal(run.timesteps, group[0].timesteps)]:
                raise SystemExit(f"{task}, {label}: {other[0].folder} and {group[0].folder} have evaluations at other interactions: give one of them")
    return tasks


def references(task, groups):
    """(name, return) of the expert, and the random policy's return: means over the task's runs."""
    runs = [run for group in groups.values() for run in group]
    experts = [(name, value) for run in runs for name, value in run.scores["references"].items() if name.startswith(("expert", "demonstrations"))]
    for run, (name, value) in zip(runs, experts, strict=True):
        if name != experts[0][0] or not math.isclose(value, experts[0][1]):
            raise SystemExit(f"{task}: {runs[0].folder} and {run.folder} have different experts, so they don't compare: plot them on their own")
    random = float(np.mean([run.scores["references"]["random policy"] for run in runs]))
    if experts[0][1] <= random:
        raise SystemExit(f"{task}: the expert's return, {experts[0][1]:.1f}, is not above the random policy's, {random:.1f}: shares of the way mean nothing")
    return *experts[0], random


# ====================================================================================================================================== numbers


def interquartile_mean(values, axis=0):
    """The mean without the lowest and the highest quarter, which is floor(n / 4) values each: the plain mean of up to three."""
    return trim_mean(values, 0.25, axis=axis)


def band(returns, n_resamples):
    """Low and high of returns (seeds, n): the interquartile mean's 95 % confidence interval by bootstrap over seeds; of under 3 seeds their range."""
    if len(returns) < 3:
        return returns.min(0), returns.max(0)
    options = {"axis": 0, "n_resamples": n_resamples, "confidence_level": 0.95, "method": "percentile", "rng": np.random.default_rng(0)}
    interval = bootstrap((returns,), interquartile_mean, vectorized=True, **options).confidence_interval
    return interval.low, interval.high


def first_reaching(timesteps, shares, level):
    """Interactions at the first evaluation with at least this share of the way; infinity where there is none."""
    reached = np.flatnonzero(shares >= level)
    return timesteps[reached[0]] if len(reached) else math.inf


def area(timesteps, shares, cloned=False):
    """Mean share over the interactions up to the last evaluation: linear between evaluations, from 0 at the start, where the policy is random.

    A policy that starts as a clone is there what it is at the first evaluation.
    """
    return np.trapezoid([shares[0] if cloned else 0, *shares], [0, *timesteps]) / timesteps[-1]


# ======================================================================================================================================== table


def row(task, label, group, expert, random):
    """A line of the table."""

    def score(which):
        values = np.array([run.scores[which]["return"] for run in group if which in run.scores])
        if not len(values):
            return "-"
        spread = f" ± {values.std(ddof=1):.0f}" if len(values) > 1 else ""
        return f"{values.mean():.0f}{spread} ({(values.mean() - random) / (expert - random):.0%})"

    curves = [(run.timesteps, (run.returns - random) / (expert - random)) for run in group]
    if not len(group[0].timesteps):  # no interactions: a flat line
        curves = [(np.array([0.0]), np.array([(run.scores["selected"]["return"] - random) / (expert - random)])) for run in group]
    reached = [[first_reaching(*curve, level) for curve in curves] for level in LEVELS]
    cells = [f"{'-' if math.isinf(np.median(each)) else thousands(np.median(each))} ({np.isfinite(each).sum()}/{len(each)})" for each in reached]
    cloned = group[0].args.get("learner") == "td3_bc" and group[0].args["cloning_steps"] > 0
    areas = [area(*curve, cloned) if curve[0][-1] else curve[1][0] for curve in curves]
    minutes = np.mean([run.seconds for run in group]) / 60
    return [task, label, len(group), thousands(curves[0][0][-1]), score("final"), score("selected"), score("mixture"), *cells, f"{np.mean(areas):.2f}", f"{minutes:.1f}"]  # fmt: skip


def thousands(timesteps):
    return f"{timesteps / 1000:g}k" if timesteps >= 1000 else f"{timesteps:g}"


def make_table(tasks, notes):
    """Markdown."""
    header = ["task", "algorithm", "seeds", "interactions", "final policy", "selected policy", "mixture"]
    header += [f"until {level:.0%}" for level in LEVELS] + ["area", "minutes"]
    rows, lines = [], []
    for task, groups in tasks.items():
        name, expert, random = references(task, groups)
        rows += [row(task, label, group, expert, random) for label, group in groups.items()]
        percent = ", in percent of successes" if any(in_percent(run.scores) for group in groups.values() for run in group) else ""
        lines.append(f"{task}: {name} {expert:.0f}, random policy {random:.0f}{percent}.")
    if all(each[6] == "-" for each in rows):
        header, *rows = ([*each[:6], *each[7:]] for each in (header, *rows))
    table = [" | ".join(map(str, each)) for each in (header, ["---"] * len(header), *rows)]
    runs = [run for groups in tasks.values() for group in groups.values() for run in group]
    versions = [each for run in runs for each in (run.args["versions"], *run.args.get("resumed_with", []))]
    commits, machines = (", ".join(sorted(values)) for values in ({each["commit"] for each in versions}, {run.args["machine"] for run in runs}))
    episodes = " or ".join(map(str, sorted({run.scores["final"]["episodes"] for run in runs})))
    lines += [
        f"Returns: mean ± standard deviation over seeds of the true return on fresh episodes ({episodes} a run), and in brackets the share of the way"
        + " from random to expert.",
        "Until 50 %, 80 %, 90 %: interactions at the first evaluation that far along the way, median over seeds (infinity for one that never got there), and"
        + " in brackets how many seeds got there. Behavioural cloning uses no interactions, and is its selected policy throughout.",
        "Area: mean over the interactions of that share, from 0 at the start (where a clone starts, as at the first evaluation); mean over seeds."
        + " Minutes: wall time of a run, mean over seeds.",
        *["NRMM's curve, and all behind the column mixture, is its mixture's. Choosing its policies takes more interactions."] * ("mixture" in header),
        f"Code: {commits}. Machine: {machines}.",
        *notes,
    ]
    return "\n".join([f"| {line} |" for line in table] + ["", *(f"- {line}" for line in lines)]) + "\n"


# ======================================================================================================================================= figure


def draw(tasks, n_resamples, path):
    """A panel a task."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    n_columns = min(3, len(tasks))
    n_rows = math.ceil(len(tasks) / n_columns)
    figure, panels = plt.subplots(n_rows, n_columns, figsize=(4.6 * n_columns, 3.4 * n_rows + 0.6), squeeze=False, layout="constrained")
    colors = {label: f"C{i}" for i, label in enumerate(dict.fromkeys(label for groups in tasks.values() for label in sorted(groups)))}
    legend = {}
    for axes, (task, groups) in zip(panels.flat, tasks.items(), strict=False):
        name, expert, random = references(task, groups)
        for label, group in groups.items():
            if len(group[0].timesteps):
                returns = np.array([run.returns for run in group])
                axes.fill_between(group[0].timesteps, *band(returns, n_resamples), color=colors[label], alpha=0.2, linewidth=0)
                (legend[label],) = axes.plot(group[0].timesteps, interquartile_mean(returns), color=colors[label], label=label)
            else:
                mean = interquartile_mean(np.array([run.scores["selected"]["return"] for run in group]))
                legend[label] = axes.axhline(mean, color=colors[label], linestyle="--", label=label)
        legend[name] = axes.axhline(expert, color="black", linestyle="--", label=name)
        legend["random policy"] = axes.axhline(random, color="black", linestyle=":", label="random policy")
        ylabel = "successes (%)" if in_percent(next(iter(groups.values()))[0].scores) else "true return"
        axes.set(title=task, xlabel="interactions used for policy optimisation", ylabel=ylabel, xlim=(0, None))
        axes.xaxis.set_major_formatter(lambda timesteps, _: thousands(timesteps))
    for axes in panels.flat[len(tasks) :]:
        axes.remove()
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=1 + n_columns, frameon=False)
    figure.savefig(f"{path}.tmp", format="png", dpi=120)
    os.replace(f"{path}.tmp", path)
    plt.close(figure)


def main():
    args = tyro.cli(Args)
    for folder in args.runs:
        if not folder.is_dir():
            raise SystemExit(f"{folder} is no folder: name one that holds folders of runs, such as runs/")
    runs, notes = load_runs(args.runs)
    tasks = name_runs(runs)
    if any(len(group) < 4 for groups in tasks.values() for group in groups.values()):
        notes.append("With 3 seeds a curve is the plain mean (a quarter of them is none), with 2 the mean in a band of both, with 1 the run itself.")
    table = make_table(tasks, notes)
    args.out.mkdir(parents=True, exist_ok=True)
    draw(tasks, args.n_resamples, args.out / "learning_curves.png")
    (args.out / "table.md.tmp").write_text(table)
    os.replace(args.out / "table.md.tmp", args.out / "table.md")
    sys.stdout.write(table)


if __name__ == "__main__":
    main()
