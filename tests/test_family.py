"""The scripts as one family: what they share is the same to the byte, and each trains, resumes and scores; then what is each one's own, by value."""

import ast
import contextlib
import copy
import dataclasses
import functools
import importlib
import io
import itertools
import json
import math
import random
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import (
    HOPPER,
    HORIZON,
    ROOT,
    Counter,
    Interrupted,
    checkpoint,
    chi_square,
    column,
    command,
    constant_evaluation,
    flags,
    interrupt_file,
    learned,
    metrics,
    run,
    same,
)

from algos import bc, filter_nr, mm_gail_ipm, nrmm_dual
from utils.demos import load, record, save
from utils.envs import ResettableEnv, make_env

FILES = ("bc", "mm_gail_ipm", "filter_br", "filter_nr", "nrmm_dual")

# --------------------------------------------------------------------------------------------------------------------------------- sameness

# Definitions that are not the same in all files: those whose copy is their own, and why. The copies of the other files are still the same.
OWN = {
    "train": (FILES, "it is the algorithm"),
    "report": (("bc", "nrmm_dual"), "BC's policy knows no exploration noise, and NRMM's mixture is scored too"),
    "Actor": (("bc",), "BC has no use for a distribution"),
    "DEFAULTS": (("bc",), "BC has few of these flags"),
    "X_AXIS": (("bc",), "BC has no interactions to count"),
}
# Lines of a definition, by a part of them, that may differ, and why. All its other lines are the same.
OWN_LINES = {
    "check_args": ("load_split(", "need_states(", "args.alpha > 0", "who resets to expert states needs them recorded"),
    "DEFAULTS": ('"alpha"', "not everybody resets to expert states with a probability"),
}
# Arguments likewise.
OWN_FIELDS = {
    "n_rollouts": (("nrmm_dual",), "of each policy tried, not of the current one"),
    "alpha": (("nrmm_dual",), "NRMM is alpha 1, on every task"),
}

METRICS = ["charts/timesteps", "charts/gradient_steps", "charts/all_timesteps", "charts/seconds"]
METRICS += ["eval/return", "eval/return_std", "eval/length", "eval/validation_error"]
METRICS += ["eval/mixture_return", "eval/mixture_return_std", "eval/mixture_length"]
METRICS += ["disc/gap", "disc/penalty", "disc/f_expert", "disc/f_expert_std", "disc/f_learner", "disc/f_learner_std", "disc/shift", "disc/learner_length"]
METRICS += ["losses/critic_loss", "losses/actor_loss", "losses/q", "losses/entropy", "losses/temperature"]
METRICS += ["losses/training_loss", "losses/validation_loss"]
METRICS += ["resets/alpha", "resets/episodes", "resets/expert_fraction"]


@functools.cache
def parts(source):
    """What a file is made of: definitions (each with the banner that it stands under), Args fields, banners and headings, metric names, what defines nothing.

    And which Args fields have no help of their own.
    """
    lines, tree = source.splitlines(keepends=True), ast.parse(source)

    def text(node):
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        return "".join(lines[first - 1 : node.end_lineno])

    banners = {i: line for i, line in enumerate(lines, 1) if line.startswith("# ====")}
    headings = list(banners.values())
    definitions, arguments, others, helpless = {}, {}, [], []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            headings += [line for line in lines[node.lineno : node.end_lineno] if line.startswith("    # ")]
            for field, following in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign):
                    name, has_help = field.target.id, isinstance(following, ast.Expr)
                    helpless += [] if has_help and name not in arguments else [name]
                    arguments[name] = text(field) + (text(following) if has_help else "")
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Assign)):
            name = ", ".join(map(ast.unparse, node.targets)) if isinstance(node, ast.Assign) else node.name
            banner = [banner for i, banner in banners.items() if i < node.lineno][-1:]
            definitions[name] = "".join(banner) + text(node)
        elif not isinstance(node, (ast.Import, ast.ImportFrom)):
            others.append(text(node))
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    names = {string for string in strings if re.fullmatch(r"(charts|eval|disc|losses|resets)/\w+", string)}
    others = others[1:]  # without the file's docstring
    return SimpleNamespace(definitions=definitions, arguments=arguments, sections=headings, metrics=names, others=others, helpless=helpless)


def order(a, b):
    """The entries of `a` that `b` has too, in a's order."""
    return [entry for entry in a if entry in b]


def differences(sources):
    """What is not the same where it should be: a sentence each. `sources` are the files' contents by name."""
    found, made = [], {file: parts(source) for file, source in sources.items()}
    for what, own, own_lines in (("definitions", OWN, OWN_LINES), ("arguments", OWN_FIELDS, {})):
        copies_of = {}
        for file, made_of in made.items():
            for name, text in getattr(made_of, what).items():
                *marks, _ = own_lines.get(name, ("",))
                copies_of.setdefault(name, {})[file] = [line for line in text.splitlines() if not any(mark in line for mark in marks)]
        for name, copies in copies_of.items():
            excepted, reason = own.get(name, ((), ""))
            shared = {file: text for file, text in copies.items() if file not in excepted}
            if any(text != next(iter(shared.values())) for text in shared.values()):
                found.append(f"{name} of the {what} differs among {', '.join(shared)}")
            for file in order(excepted, copies):
                others = [text for other, text in copies.items() if other != file]
                if others and all(text == copies[file] for text in others):
                    found.append(f"{name} of {file} is everybody's: no exception is needed ({reason})")
    for a, b in itertools.combinations(sources, 2):
        for what in ("sections", "definitions", "arguments"):
            if order(getattr(made[a], what), getattr(made[b], what)) != order(getattr(made[b], what), getattr(made[a], what)):
                found.append(f"{what} of {a} and {b} stand in another order")
    for file, made_of in made.items():
        found += [f"{name} of {file} is no metric of the family's" for name in sorted(made_of.metrics - set(METRICS))]
        found += [f"argument {name} of {file} stands twice, or has no help" for name in made_of.helpless]
        if made_of.others != next(iter(made.values())).others:
            found.append(f"statements that define nothing differ in {file}")
    return found


@pytest.fixture(scope="session")
def sources():
    return {name: (ROOT / "algos" / f"{name}.py").read_text() for name in FILES}


def test_shared_definitions_are_the_same(sources):
    assert differences(sources) == []


@pytest.mark.parametrize("file", ["bc", "nrmm_dual"])
def test_every_piece_counts(file, sources):
    """Three characters more, in any shared definition or argument of a file, are noticed, and so said."""
    for what, own in (("definitions", OWN), ("arguments", OWN_FIELDS)):
        for name, piece in getattr(parts(sources[file]), what).items():
            if sum(name in getattr(parts(source), what) for source in sources.values()) == 1 or file in own.get(name, ((),))[0]:
                continue
            piece = piece.split("\n", 1)[1] if piece.startswith("# ==") else piece
            assert sources[file].count(piece) == 1
            said = differences(sources | {file: sources[file].replace(piece, piece.rstrip("\n") + "  #\n")})
            assert len(said) == 1 and said[0].startswith(f"{name} of the {what} differs among "), (name, said)


CHANGES = {
    "a sign": ("filter_nr", "f_expert.mean() - learner_weight", "f_expert.mean() + learner_weight", "moment_gap of the definitions"),
    "a decorator": ("nrmm_dual", "@torch.no_grad()\ndef label", "def label", "label of the definitions"),
    "a default": ("mm_gail_ipm", "buffer_size: int = 300_000", "buffer_size: int = 200_000", "buffer_size of the arguments"),
    "a type": ("bc", "seed: int = 1", "seed: float = 1", "seed of the arguments"),
    "help": ("bc", '"""the task"""', '"""the taks"""', "env_id of the arguments"),
    "a line of check_args": ("nrmm_dual", '"init_temperature" and value <= 0', '"init_temperature" and value < 0', "check_args of the definitions"),
    "a constant": ("filter_nr", '"interactions")', '"steps")', "X_AXIS of the definitions"),
    "a metric": ("mm_gail_ipm", '"resets/episodes"', '"resets/n_episodes"', "resets/n_episodes of mm_gail_ipm is no metric"),
    "a banner": ("bc", "== logs, files and resuming\n", "== logs and files\n", "Log of the definitions"),
    "the end": ("bc", 'if __name__ == "__main__":\n    main()', 'if __name__ == "__main__":\n    main()  # ', "statements that define nothing"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change, sources):
    file, old, new, sentence = CHANGES[change]
    assert sources[file].count(old) == 1
    assert any(said.startswith(sentence) for said in differences(sources | {file: sources[file].replace(old, new)}))


def test_order_and_needless_exceptions_are_noticed(sources):
    lines = sources["filter_nr"].split("# ====")
    i = next(i for i, section in enumerate(lines) if " expert resets\n" in section)
    lines[i], lines[i + 1] = lines[i + 1], lines[i]
    said = differences(sources | {"filter_nr": "# ====".join(lines)})
    assert any(sentence.startswith("sections of filter_br and filter_nr") for sentence in said)
    said = differences({file: re.sub("X_AXIS = .*", "X_AXIS = None", source) for file, source in sources.items()})
    assert any(sentence.startswith("X_AXIS of bc is everybody's") for sentence in said)


# ------------------------------------------------------------------------------------------------------------------- each one trains and resumes


def modules(*names):
    return pytest.mark.parametrize("script", names)


@pytest.fixture(scope="session")
def runs(tiny, tmp_path_factory):
    """A tiny training of each script, when it is first asked for: its arguments, folder, first and last networks, and what it printed."""

    @functools.cache
    def train_once(script):
        module, folder = importlib.import_module(f"algos.{script}"), tmp_path_factory.mktemp(script)
        # With this much trembling, and this many episodes, hardly two evaluations have the same score.
        args, start, printed = tiny(module=module, p_tremble=0.5, eval_episodes=10, final_eval_episodes=10), {}, io.StringIO()
        (folder / "args.json").write_text(json.dumps(module.describe_run(args)))
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
            for name in ("Actor", "TwinQ", "Reward"):
                if hasattr(module, name):
                    patch.setattr(module, name, spy(getattr(module, name), start))
            end = run(args, folder)
        return SimpleNamespace(args=args, module=module, folder=folder, start=start, end=end, printed=printed.getvalue())

    return train_once


def spy(network, start):
    """`network`, whose first instance's parameters are noted in `start` by its name."""

    class Spy(network):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            start.setdefault(network.__name__, copy.deepcopy(self.state_dict()))

    return Spy


@modules(*FILES)
def test_everything_moves(script, runs):
    done = runs(script)
    if script == "bc":
        pairs = [(done.start["Actor"], done.end["actor"])]
    else:
        pairs = [(done.start["Actor"], done.end["agent"]["actor"]), (done.start["TwinQ"], done.end["agent"]["critic"])]
        pairs += [(done.start["Reward"], done.end["f"])]
        assert done.end["agent"]["critic_optimizer"]["t"] == 16 * 4  # bursts at 96, 128 ... 576: the first 64 actions are random
        assert done.end["f_optimizer"]["t"] == 3 * done.args.disc_steps
    for before, after in pairs:
        for name in learned(before):
            assert (before[name] != after[name]).any() and torch.isfinite(after[name]).all(), name


@modules(*FILES)
def test_writes_what_it_says(script, runs):
    done = runs(script)
    (header,) = {tuple(row) for row in metrics(done.folder, without=())}
    assert list(header) == order(METRICS, header) and len(metrics(done.folder)) == 3
    x = done.module.X_AXIS[0]
    assert header[0] == x and column(done.folder, x).tolist() == ([20, 40, 60] if script == "bc" else [200, 400, 600])
    assert all(np.isfinite(column(done.folder, name)).all() for name in header)
    if script != "bc":
        rolled_out = done.end["counts"]["rollout_timesteps"]
        assert column(done.folder, "charts/all_timesteps")[-1] == 600 + rolled_out and 3 * 4 <= rolled_out <= 7 * 4 * HORIZON
        count, _, _, count_next, x_next, terminated, _ = done.end["buffer"]["rows"].numpy().T
        np.testing.assert_array_equal(count_next, count + 1)
        np.testing.assert_array_equal(terminated, np.abs(x_next) >= 1)  # never of the horizon
        assert ((count_next == HORIZON) & (terminated == 0)).any() and terminated.any()


@modules(*FILES)
def test_a_length_that_is_no_multiple(script, tiny, tmp_path, monkeypatch):
    """The last iteration is shorter: not one step too many, no learning rate below 0, and it is evaluated whatever its number."""
    module, rates = importlib.import_module(f"algos.{script}"), []
    if script == "bc":
        run(tiny(module=module, total_gradient_steps=47, eval_every=2), tmp_path / "run")
        steps, n_steps = [20, 40, 47], checkpoint(tmp_path / "run")["optimizer"]["state"][0]["step"]
    else:
        update = module.SAC.update
        monkeypatch.setattr(module.SAC, "update", lambda self, batch, rate: rates.append(float(rate)) or update(self, batch, rate))
        args = tiny(module=module, total_timesteps=475, eval_every=2)
        steps, n_steps = [200, 400, 475], run(args, tmp_path / "run")["buffer"]["n_added"]
        np.testing.assert_allclose(rates, np.repeat([args.learning_rate * (1 - t / 475) for t in range(96, 475, 32)], 4), rtol=1e-5)
    assert column(tmp_path / "run", module.X_AXIS[0]).tolist() == steps and n_steps == steps[-1]
    assert [row["eval/return"] != "" for row in metrics(tmp_path / "run")] == [False, True, True]
    assert json.loads((tmp_path / "run" / "scores.json").read_text())["final"]["step"] == steps[-1]


@modules(*FILES)
def test_eval_says_what_training_said(script, runs, capsys):
    """The same lines, and the same numbers as in scores.json."""
    done = runs(script)
    said = [line for line in done.printed.splitlines() if " over 10 episodes, " in line]
    capsys.readouterr()
    assert command(ROOT, "--eval", done.folder, script=script) is None
    assert capsys.readouterr().out.splitlines() == said
    scores = json.loads((done.folder / "scores.json").read_text())
    assert list(scores) == ["selected", "final", *(["mixture"] if script == "nrmm_dual" else []), "references"] and len(said) == len(scores) - 1
    for line, what in zip(said, scores, strict=False):
        score = scores[what]
        assert f" {score['step']} {done.module.X_AXIS[1]}: return {score['return']:.1f} +- {score['return_std']:.1f} over {score['episodes']}" in line
    assert scores["references"] == done.end["references"] and scores["final"]["step"] in (60, 600)


def files_of(folder):
    """All that a run leaves and that doesn't name the time."""
    saved = {name.name: torch.load(name, weights_only=True) for name in folder.glob("*.pt") if name.name != "checkpoint.pt"}
    return saved | {"metrics.csv": metrics(folder), "scores.json": (folder / "scores.json").read_text(), "checkpoint.pt": checkpoint(folder)}


@pytest.mark.parametrize("script", [*FILES, "mmdp"])
@pytest.mark.parametrize("mode", ["--resume", "--eval"])
def test_a_run_of_an_older_version(mode, script, checkout):
    """Which had a flag less: a sentence that names the flag and the commit, and an untouched folder."""
    module, folder = importlib.import_module(f"algos.{script}"), checkout / "runs" / "older"
    folder.mkdir(parents=True)
    described = module.describe_run(module.Args())
    del described["eval_episodes"]
    (folder / "args.json").write_text(json.dumps(described))
    message = command(checkout, mode, folder, script=script)
    assert "older was made by a script without --eval-episodes" in message and described["versions"]["commit"] in message and "\n" not in message
    assert json.loads((folder / "args.json").read_text()) == described and len(list(folder.iterdir())) == 1


MOMENTS = [(script, *moment) for script in FILES if script != "filter_br" for moment in (("checkpoint.pt", 2), ("final_policy.pt", 3), ("scores.json", 1))]
MOMENTS += [("nrmm_dual", "mixture.pt", 2)]


@pytest.mark.parametrize(("script", "name", "nth"), MOMENTS)
def test_resumes_to_the_same_numbers(script, name, nth, runs, tmp_path):
    """Killed between writing a file and putting it in its place: then the run has the same files in the end. (For filter_br, see its own tests.)"""
    done = runs(script)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        interrupt_file(patch, name, nth)
        run(done.args, tmp_path / "run")
    assert not (tmp_path / "run" / "scores.json").exists()
    run(done.args, tmp_path / "run")
    resumed, expected = files_of(tmp_path / "run"), files_of(done.folder)
    assert [file for file in expected if not same(resumed[file], expected[file])] == [] and resumed.keys() == expected.keys()


@modules("bc", "nrmm_dual")
def test_killed_and_resumed(script, tiny, tmp_path, checkout):
    """kill -9 at a random moment after the first checkpoint, and --resume in a new process."""
    module = importlib.import_module(f"algos.{script}")
    length = {"total_gradient_steps": 1500, "iteration_gradient_steps": 300} if script == "bc" else {"total_timesteps": 1000}
    args = tiny(HOPPER, module, **length)
    program = [sys.executable, f"algos/{script}.py"]
    process = subprocess.Popen([*program, *flags(args)], cwd=checkout, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline, saved = time.time() + 300, []
    while not saved and process.poll() is None and time.time() < deadline:
        time.sleep(0.005)
        saved = list(checkout.glob("runs/*/checkpoint.pt"))
    time.sleep(random.uniform(0, 0.3))
    process.kill()
    assert process.wait() == -signal.SIGKILL, "it ended by itself"
    (folder,) = checkout.glob("runs/*")
    assert not (folder / "scores.json").exists()
    resume = subprocess.run([*program, "--resume", folder], cwd=checkout, capture_output=True, text=True, timeout=300, check=False)
    assert resume.returncode == 0, resume.stderr
    assert "resumed_with" not in json.loads((folder / "args.json").read_text())  # the versions are those that it began with
    run(args, tmp_path / "uninterrupted")
    resumed, expected = files_of(folder), files_of(tmp_path / "uninterrupted")
    assert [file for file in expected if not same(resumed[file], expected[file])] == []


@modules(*FILES)
def test_an_interrupt_says_how_to_go_on(script, tiny, checkout, monkeypatch):
    """Ctrl-C in the second iteration: one sentence, no traceback, and what it names finishes the run."""
    interrupt_file(monkeypatch, "checkpoint.pt", 2, KeyboardInterrupt)
    module = importlib.import_module(f"algos.{script}")
    message = command(checkout, *flags(tiny("Counter-v0", module)), script=script)
    (folder,) = checkout.glob("runs/*")
    assert message == f"interrupted; to go on: python {checkout}/algos/{script}.py --resume {folder}" and not (folder / "scores.json").exists()
    with module.hold(folder):  # as another process would
        assert command(checkout, *message.split()[-2:], script=script) == f"another process is at {folder}: wait for its end, or stop it"
    described = json.loads((folder / "args.json").read_text())
    begun = described | {"versions": described["versions"] | {"commit": "an older one"}}
    (folder / "args.json").write_text(json.dumps(begun))
    assert command(checkout, *message.split()[-2:], script=script) is None and (folder / "scores.json").exists()
    assert json.loads((folder / "args.json").read_text()) == begun | {"resumed_with": [described["versions"]]}


@modules(*FILES)
def test_eval_without_the_task(script, checkout):
    """A run of a task that is not to be had here, such as one whose package is missing: a sentence."""
    module, folder = importlib.import_module(f"algos.{script}"), checkout / "runs" / "elsewhere"
    folder.mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps(module.describe_run(module.Args(env_id="nowhere:Task-v0"))))
    assert command(checkout, "--eval", folder, script=script).startswith("unknown environment 'nowhere:Task-v0' (No module named 'nowhere')")


@modules(*(script for script in FILES if script != "filter_br"))
def test_no_true_reward_reaches_training(script, runs, tmp_path, monkeypatch):
    """Neither the environment's nor the demonstrations': with noise in their place every weight and random stream is the same. (filter_br: its own tests.)"""
    done, step, rng = runs(script), ResettableEnv.step, np.random.default_rng(0)

    def step_noise(env, action):
        observation, _, *rest = step(env, action)
        return observation, 1000 * rng.normal(), *rest

    def load_noise(source, env):
        demos = load(source, env, check_dynamics=False)
        return dataclasses.replace(demos, rewards=1000 * rng.normal(size=len(demos.rewards)))

    monkeypatch.setattr(ResettableEnv, "step", step_noise)
    monkeypatch.setattr("utils.demos.load", load_noise)
    end = run(done.args, tmp_path / "run")
    assert [name for name in end if not same(end[name], done.end[name])] == ["references"]  # where the noise did arrive
    selected, expected = (torch.load(folder / "policy.pt", weights_only=True) for folder in (tmp_path / "run", done.folder))
    assert same(selected["actor"], expected["actor"]) and selected["step"] == expected["step"]


# ------------------------------------------------------------------------------------------------------- FILTER(NR) and MM: all roll-outs so far


def test_rollouts_by_value():
    """Pairs in the order in which they came, in one block that never moves, also through a checkpoint; more than it holds is an error."""
    rollouts, rng = filter_nr.Rollouts(12, 3), np.random.default_rng(0)
    episodes = [rng.normal(size=(n, 3)).astype(np.float32) for n in (4, 1, 5)]
    address = rollouts.block.data_ptr()
    rollouts.add(episodes[:2])
    assert torch.equal(rollouts.pairs, torch.from_numpy(np.concatenate(episodes[:2]))) and rollouts.n_episodes == 2
    other = filter_nr.Rollouts(12, 3)
    state = rollouts.state_dict()
    assert state["pairs"].untyped_storage().nbytes() == 5 * 3 * 4  # a slice would be saved with the whole block behind it
    other.load_state_dict(copy.deepcopy(state))
    for each in (rollouts, other):
        each.add(episodes[2:])
        assert torch.equal(each.pairs, torch.from_numpy(np.concatenate(episodes))) and each.n_episodes == 3
    assert rollouts.block.data_ptr() == rollouts.pairs.data_ptr() == address
    with pytest.raises(RuntimeError):
        rollouts.add(episodes[:1])


# Of resets, warm-up and the random policy; and the trembling of training, roll-outs, the random policy, an evaluation and the scores at the end.
N_NUMPY_STREAMS = {"mm_gail_ipm": 7, "filter_br": 8, "filter_nr": 8, "nrmm_dual": 8 + 2 + 3}  # MM has no resets; the mixture's episodes have one each


@modules(*N_NUMPY_STREAMS)
def test_random_streams_are_different_ones(script, tiny, tmp_path, monkeypatch):
    """Generators of the same seed would give weights, policy, reward player and all the rest the same random numbers."""
    module, seeds, states, rngs = importlib.import_module(f"algos.{script}"), {}, [], []
    update_reward, random_action = module.update_reward, ResettableEnv.random_action

    class SpySAC(module.SAC):
        def __init__(self, *arguments):
            seeds["weights"], seeds["policy"] = torch.initial_seed(), arguments[-1].initial_seed()
            super().__init__(*arguments)

    def spy_update_reward(*arguments):
        seeds["reward"] = arguments[-1].initial_seed()
        return update_reward(*arguments)

    def first_state(rng):
        if not any(rng is known for known in rngs):
            rngs.append(rng)
            states.append(str(rng.bit_generator.state))

    monkeypatch.setattr(module, "SAC", SpySAC)
    monkeypatch.setattr(module, "update_reward", spy_update_reward)
    monkeypatch.setattr(ResettableEnv, "random_action", lambda env, rng: first_state(rng) or random_action(env, rng))
    if hasattr(module, "start_episode"):
        start_episode = module.start_episode
        monkeypatch.setattr(module, "start_episode", lambda *arguments: first_state(arguments[-1]) or start_episode(*arguments))
    run(tiny(module=module, total_timesteps=64, iteration_timesteps=64, p_tremble=1.0), tmp_path / "run")
    assert len(set(seeds.values())) == len(seeds) == 3
    assert len(set(states)) == len(states) == N_NUMPY_STREAMS[script]


@modules("filter_nr", "mm_gail_ipm")
def test_reward_player_sees_all_rollouts_once(script, tiny, tmp_path, monkeypatch):
    """At each update exactly the roll-outs of all policies so far, by value and at the same address; its weights are mean lengths over the horizon."""
    module = importlib.import_module(f"algos.{script}")
    rolled_out, seen, roll_out, update_reward = [], [], module.roll_out, module.update_reward

    def spy_roll_out(*arguments):
        episodes, returns = roll_out(*arguments)
        rolled_out.extend(episodes)
        return episodes, returns

    def spy_update_reward(f, optimizer, expert_pairs, learner_pairs, weights, *rest):
        assert torch.equal(learner_pairs, torch.from_numpy(np.concatenate(rolled_out))) and len(rolled_out) == 4 * (len(seen) + 1)
        np.testing.assert_allclose(weights[1], np.mean([len(episode) for episode in rolled_out]) / HORIZON)
        seen.append((learner_pairs.data_ptr(), len(learner_pairs)))
        return update_reward(f, optimizer, expert_pairs, learner_pairs, weights, *rest)

    monkeypatch.setattr(module, "evaluate", constant_evaluation)  # whose roll-outs are none of the reward player's
    monkeypatch.setattr(module, "roll_out", spy_roll_out)
    monkeypatch.setattr(module, "update_reward", spy_update_reward)
    end = run(tiny(module=module, payoff="sum"), tmp_path / "run")
    addresses, sizes = zip(*seen, strict=True)
    assert len(set(addresses)) == 1 and len(seen) == 3 and list(sizes) == sorted(set(sizes))
    assert torch.equal(end["rollouts"]["pairs"], torch.from_numpy(np.concatenate(rolled_out)))
    lengths = [len(episode) for episode in rolled_out]
    np.testing.assert_allclose(column(tmp_path / "run", "disc/learner_length"), [np.mean(lengths[: 4 * i]) for i in (1, 2, 3)])
    for episode in rolled_out:  # whole ones, from the environment's own start states
        np.testing.assert_array_equal(episode[:, 0], np.arange(len(episode)))
        assert abs(episode[0, 1]) < 0.5


def test_filter_nr_resets_as_asked(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(filter_nr, "evaluate", constant_evaluation)
    run(tiny(module=filter_nr, anneal_alpha=True, gradient_steps=1), tmp_path / "run")
    assert column(tmp_path / "run", "resets/alpha").tolist() == [1, 0.5, 0]
    first, second, third = column(tmp_path / "run", "resets/expert_fraction")
    assert (first, third) == (1, 0) and 0.2 < second < 0.8


@pytest.fixture
def stateless(demo_files, tmp_path):
    demos = load(demo_files["Counter-v0"], make_env("Counter-v0"))
    save(tmp_path / "stateless.npz", dataclasses.replace(demos, states=None))
    return str(tmp_path / "stateless.npz")


def test_mm_never_resets_to_an_expert_state(stateless, tiny, tmp_path, monkeypatch):
    """It needs no states, calls nothing that restores one, and every one of its episodes starts at count 0."""
    monkeypatch.setattr("utils.envs.set_state", None)
    monkeypatch.setattr(mm_gail_ipm, "evaluate", constant_evaluation)
    args = tiny(module=mm_gail_ipm, demos=stateless, buffer_size=1000)
    mm_gail_ipm.check_args(args)
    count, _, _, count_next, _, terminated, _ = run(args, tmp_path / "run")["buffer"]["rows"].numpy().T
    ends = (count_next == HORIZON) | (terminated == 1)
    assert count[0] == 0 and (count[1:][ends[:-1]] == 0).all() and len(count) == 600
    assert (count[1:][~ends[:-1]] > 0).all() and ends.sum() == column(tmp_path / "run", "resets/episodes").sum()


@modules("filter_nr", "nrmm_dual")
def test_states_are_asked_for_where_they_are_needed(script, stateless, tiny):
    module = importlib.import_module(f"algos.{script}")
    with pytest.raises(SystemExit, match="has no simulator states, and --alpha " + ("1.0" if script == "nrmm_dual" else "0.5")):
        module.check_args(tiny(module=module, demos=stateless))
    module.check_args(tiny(module=module, demos=stateless, alpha=0.0))


# ---------------------------------------------------------------------------------------------------------------------------------- NRMM, dual


def uniformity(sample):
    """The Kolmogorov-Smirnov distance of `sample` from the uniform distribution on [-1, 1], times sqrt(n): below 1.95 in 999 of 1000 cases."""
    sample, n = (np.sort(sample) + 1) / 2, len(sample)
    return math.sqrt(n) * max((np.arange(1, n + 1) / n - sample).max(), (sample - np.arange(n) / n).max())


def test_nrmm_starts_from_expert_states_with_random_actions(tiny, tmp_path, monkeypatch, demo_files):
    """Every episode: after the end of another, and where a new policy is tried. Its first action is random, all others are the policy's (after warm-up)."""
    random_actions, random_action = [], ResettableEnv.random_action

    def spy_random_action(env, rng):
        random_actions.append(random_action(env, rng))
        return random_actions[-1]

    monkeypatch.setattr(nrmm_dual, "evaluate", constant_evaluation)
    monkeypatch.setattr(ResettableEnv, "random_action", spy_random_action)
    args = tiny(module=nrmm_dual, buffer_size=1000, p_tremble=0.0, inner_iterations=3, gsde=True, gradient_steps=1)
    rows = run(args, tmp_path / "run")["buffer"]["rows"].numpy()
    count, x, action, count_next, x_next, terminated, _ = rows.T
    starts = np.r_[True, (count_next == HORIZON) | (terminated == 1)][:-1]
    for i in (0, 200, 400):
        starts[[i, i + 66, i + 133]] = True  # 200 interactions, for three policies
    np.testing.assert_array_equal(count[1:][~starts[1:]], count_next[:-1][~starts[1:]])
    np.testing.assert_array_equal(x[1:][~starts[1:]], x_next[:-1][~starts[1:]])
    demos = load(demo_files["Counter-v0"], make_env("Counter-v0")).subset(range(3))
    expert = set(map(tuple, demos.observations))
    assert {(c, p) for c, p in zip(count[starts], x[starts], strict=True)} == expert  # each of them, at each time
    assert len(expert) == len(demos.observations) and starts.sum() == column(tmp_path / "run", "resets/episodes").sum()

    at_random = starts | (np.arange(600) < 64)
    np.testing.assert_array_equal(action[at_random], np.concatenate(random_actions))
    firsts = action[starts & (np.arange(600) >= 64)]
    assert uniformity(firsts) < 1.95 < uniformity(action[~at_random]) and len(firsts) > 100


def test_nrmm_with_alpha_below_1(tiny, tmp_path, monkeypatch, demo_files):
    """Some episodes start where the environment does, by a random action as well; as many as alpha says, and as the metrics say."""
    monkeypatch.setattr(nrmm_dual, "evaluate", constant_evaluation)
    args = tiny(module=nrmm_dual, alpha=0.25, buffer_size=1000, p_tremble=0.0, inner_iterations=3, gsde=True, gradient_steps=1)
    count, x, action, count_next, _, terminated, _ = run(args, tmp_path / "run")["buffer"]["rows"].numpy().T
    starts = np.r_[True, (count_next == HORIZON) | (terminated == 1)][:-1]
    for i in (0, 200, 400):
        starts[[i, i + 66, i + 133]] = True
    expert = set(map(tuple, load(demo_files["Counter-v0"], make_env("Counter-v0")).subset(range(3)).observations))
    own = np.array([(c, p) not in expert for c, p in zip(count[starts], x[starts], strict=True)])
    assert (count[starts][own] == 0).all() and (np.abs(x[starts][own]) < 0.5).all()
    assert own.mean() == pytest.approx(0.75, abs=4 * math.sqrt(0.25 * 0.75 / len(own))) and len(own) > 60
    assert column(tmp_path / "run", "resets/alpha").tolist() == [0.25] * 3
    n_expert = column(tmp_path / "run", "resets/expert_fraction") * column(tmp_path / "run", "resets/episodes")
    assert n_expert.sum() == pytest.approx((~own).sum())
    assert uniformity(action[starts][own]) < 1.95


def test_nrmm_keeps_the_best_policy_of_each_iteration(tiny, tmp_path, monkeypatch):
    """One policy an iteration, the best under f of those tried, and the first of equals; their roll-outs are what the next f sees, as many of each."""
    values, best = iter([1.0, 5.0, 2.0, 7.0, 7.0, 6.0, -9.0, -8.0, -7.0]), [1, 0, 2]
    tried, asked, seen = [], [], []
    try_policy, update_reward = nrmm_dual.try_policy, nrmm_dual.update_reward

    def spy_try_policy(args, env, actor, rng, counts):
        episodes = try_policy(args, env, actor, rng, counts)
        tried.append((copy.deepcopy(actor.state_dict()), episodes))
        return episodes

    def spy_update_reward(f, optimizer, expert_pairs, learner_pairs, *rest):
        seen.append(learner_pairs.clone())
        logs = update_reward(f, optimizer, expert_pairs, learner_pairs, *rest)
        asked.append((f, 0.3 - f(expert_pairs).mean().item()))
        return logs

    def scripted_value(f, shift, episodes):
        assert f is asked[-1][0] and shift == pytest.approx(asked[-1][1], abs=1e-6) and episodes is tried[-1][1]
        return next(values)

    for name, spied in (("try_policy", spy_try_policy), ("update_reward", spy_update_reward), ("value_under", scripted_value)):
        monkeypatch.setattr(nrmm_dual, name, spied)
    monkeypatch.setattr(nrmm_dual, "evaluate", constant_evaluation)
    args = tiny(module=nrmm_dual, inner_iterations=3, n_rollouts=2, gradient_steps=1, payoff="mean", reward_level=0.3)
    end = run(args, tmp_path / "run")
    assert len(tried) == 1 + 9 and next(values, None) is None
    kept = [tried[1 + 3 * i + best[i]] for i in range(3)]
    assert len(end["mixture"]) == 3 and all(same(policy, expected) for policy, (expected, _) in zip(end["mixture"], kept, strict=True))
    assert not any(same(tried[i][0], tried[i + 1][0]) for i in range(1, 9))  # they are different policies
    saved = torch.load(tmp_path / "run" / "mixture.pt", weights_only=True)
    assert same(saved, {"actors": end["mixture"], "step": 600})
    # Before the first, there is the policy that nothing has taught yet.
    expected = [np.concatenate(episodes) for _, episodes in [tried[0], *kept]]
    for i, pairs in enumerate([*seen, end["rollouts"]["pairs"]], 1):
        assert torch.equal(pairs, torch.from_numpy(np.concatenate(expected[:i]))) and (pairs[:, 0] == 0).sum() == 2 * i
    assert end["counts"]["rollout_timesteps"] == sum(len(episode) for _, episodes in tried for episode in episodes)


def test_value_by_hand():
    """Of whole episodes, ends included: f is 1, 2 | 3, 4, 5, and 10 is added to each."""
    episodes = [np.float32([[1, 0], [2, 0]]), np.float32([[3, 0], [4, 0], [5, 0]])]
    assert nrmm_dual.value_under(lambda x: x[:, 0], 10.0, episodes) == pytest.approx((15 + 5 * 10) / 2)


def test_mixture_draws_a_policy_an_episode(tiny, monkeypatch):
    """Uniformly, in episodes with seeds of their own; the score is over the episodes."""
    actor, actors, drawn, seeds = nrmm_dual.Actor(2, Counter.action_space), [], [], []
    with torch.no_grad():
        for weight in (actor.hidden[3].weight, actor.mean.weight):
            weight.zero_()
        for mean in (-0.9, -0.3, 0.3, 0.9):  # what tells them apart
            actor.mean.bias.fill_(math.atanh(mean))
            actors.append(copy.deepcopy(actor.state_dict()))

    def spy_make_env(env_id, **options):
        seeds.append(options.get("seed"))
        return make_env(env_id, **options)

    def spy_evaluate(env, act, n_episodes):
        drawn.append(round((float(act(np.zeros(2, dtype=np.float32))[0]) + 0.9) / 0.6))
        assert n_episodes == 1
        return {"return": float(drawn[-1]), "return_std": 0.0, "length": 2.0 * drawn[-1]}

    monkeypatch.setattr(nrmm_dual, "make_env", spy_make_env)
    monkeypatch.setattr(nrmm_dual, "evaluate", spy_evaluate)
    score = nrmm_dual.evaluate_mixture(tiny(module=nrmm_dual), actors, (1, 12, 600), 2000)
    seeds.remove(None)  # of an environment that is asked for its spaces alone
    assert chi_square(np.bincount(drawn, minlength=4), np.full(4, 1 / 4)) < 5 and len(set(seeds)) == len(seeds) == 2000
    assert score == pytest.approx({"return": np.mean(drawn), "return_std": np.std(drawn), "length": 2 * np.mean(drawn)})
    assert np.corrcoef(drawn[:-1], drawn[1:])[0, 1] < 0.1
    first = drawn[:100]
    drawn.clear()
    nrmm_dual.evaluate_mixture(tiny(module=nrmm_dual), actors, (1, 12, 601), 100)
    assert drawn != first


# ------------------------------------------------------------------------------------------------------------------------------------------- BC


@pytest.fixture(scope="session")
def pendulum_demos(tmp_path_factory):
    """Of an expert whose action, in [-2, 2], is linear in the observation."""
    path = tmp_path_factory.mktemp("pendulum") / "demos.npz"
    save(path, record(make_env("Pendulum-v1", seed=3), lambda o: np.float32([o @ np.float32([0.9, -0.6, 0.05])]), 5, "a test"))
    return str(path)


def numpy_policy(actor, observations):
    """2 tanh(u), with u from two hidden layers: the deterministic head, in double precision."""
    weights = {name: value.double().numpy() for name, value in actor.items()}
    h = observations.astype(np.float64)
    for layer in ("hidden.1", "hidden.3"):
        h = np.maximum(h @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"], 0)
    return 2 * np.tanh(h @ weights["mean.weight"].T + weights["mean.bias"])


def test_bc_is_least_squares(tiny, pendulum_demos, tmp_path, monkeypatch):
    """One gradient step: the logged losses are those computed by hand, in units of the range, and each parameter went down its gradient."""
    Actor, start, batches, randint = bc.Actor, {}, [], torch.randint

    def spy_randint(*arguments, **options):
        batches.append(randint(*arguments, **options))
        return batches[-1]

    monkeypatch.setattr(bc, "Actor", spy(Actor, start))
    monkeypatch.setattr(bc, "evaluate", constant_evaluation)
    monkeypatch.setattr(torch, "randint", spy_randint)
    changes = {"total_gradient_steps": 1, "iteration_gradient_steps": 1, "batch_size": 40, "bc_learning_rate": 1e-3}
    end = run(tiny("Pendulum-v1", bc, demos=pendulum_demos, **changes), tmp_path / "run")
    demos = load(pendulum_demos, make_env("Pendulum-v1"))
    training, validation, rows = demos.subset([0, 1, 2]), demos.subset([3, 4]), batches[0][0].numpy()
    assert len(batches) == 1 and rows.shape == (40,) and rows.max() < len(training.actions)
    for name, data, actor, index in (("training", training, start["Actor"], rows), ("validation", validation, end["actor"], slice(None))):
        errors = (numpy_policy(actor, data.observations[index]) - data.actions[index]) / 2
        assert column(tmp_path / "run", f"losses/{name}_loss")[0] == pytest.approx((errors**2).mean(), rel=1e-4)

    actor = Actor(3, make_env("Pendulum-v1").action_space)
    actor.load_state_dict(start["Actor"])
    actor = actor.double()
    observations, actions = (torch.from_numpy(array[rows]).double() for array in (training.observations, training.actions))
    torch.nn.functional.mse_loss(actor(observations) / 2, actions / 2).backward()
    for name, parameter in actor.named_parameters():
        moved, clear = end["actor"][name].double() - parameter.detach(), parameter.grad.abs() > 1e-5
        assert clear.any() and (moved[clear] + 1e-3 * parameter.grad[clear].sign()).abs().max() < 2e-5, name  # Adam's first step


def test_bc_fits_a_linear_expert_without_interaction(tiny, pendulum_demos, tmp_path, monkeypatch):
    """To an error of about a hundredth of the range, and near to it on validation data, which lead elsewhere.

    The environment takes no step but in evaluations, which are left out here.
    """
    steps = []
    monkeypatch.setattr(bc, "evaluate", constant_evaluation)
    monkeypatch.setattr("utils.demos.load", lambda source, env: load(source, env, check_dynamics=False))
    monkeypatch.setattr(ResettableEnv, "step", lambda env, action: steps.append(action))
    changes = {"total_gradient_steps": 600, "iteration_gradient_steps": 300, "batch_size": 256, "bc_learning_rate": 1e-3}
    run(tiny("Pendulum-v1", bc, demos=pendulum_demos, **changes), tmp_path / "run")
    training, validation = column(tmp_path / "run", "losses/training_loss"), column(tmp_path / "run", "losses/validation_loss")
    assert training[-1] < 2e-4 and validation[-1] < 0.02 and not steps
    final = torch.load(tmp_path / "run" / "final_policy.pt", weights_only=True)
    demos = load(pendulum_demos, make_env("Pendulum-v1"), check_dynamics=False).subset(range(3))
    assert np.abs(numpy_policy(final["actor"], demos.observations) - demos.actions).mean() < 0.03 < np.abs(demos.actions).mean() / 10


def test_bc_returns_the_policy_of_least_validation_error(tiny, tmp_path, monkeypatch):
    """And not that of the greatest return, nor the last."""
    scripted = [(0.0, math.nan), (2.0, 0.3), (1.0, 0.1), (3.0, 0.2)]  # random policy, and after each iteration
    actors, names = [], ("return", "validation_error", "return_std", "length")
    monkeypatch.setattr(bc, "evaluate", lambda *arguments: dict(zip(names, (*scripted[len(actors)], 0.0, 0.0), strict=True)))
    monkeypatch.setattr(bc, "deterministic", lambda actor: actors.append(copy.deepcopy(actor.state_dict())))
    monkeypatch.setattr(bc, "report", lambda *arguments: {})
    run(tiny(module=bc), tmp_path / "run")
    selected, final = (torch.load(tmp_path / "run" / name, weights_only=True) for name in ("policy.pt", "final_policy.pt"))
    assert (selected["step"], final["step"]) == (40, 60) and same(selected["actor"], actors[1]) and same(final["actor"], actors[2])
    assert not same(actors[1], actors[2])
