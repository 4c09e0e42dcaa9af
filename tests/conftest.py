"""What the tests of the algorithms share: a task whose every number can be checked by hand, tiny trainings on it, and ways to interrupt them."""

import csv
import dataclasses
import os
import runpy
import shutil
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

from algos import filter_br
from utils.demos import load, record, save
from utils.envs import make_env

ROOT = Path(__file__).resolve().parents[1]
HOPPER = "HopperBulletEnv-v0"
HORIZON = 5  # of the task below


class Counter(gym.Env):
    """The observation is (steps since the start state, position); the action moves the position, and leaving (-1, 1) ends the episode.

    So every transition can be checked from its numbers alone. At the horizon the count is 5.
    """

    observation_space = gym.spaces.Box(-10, 10, (2,))
    action_space = gym.spaces.Box(-1, 1, (1,))

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return self.set_state([0, self.np_random.uniform(-0.5, 0.5)]), {}

    def step(self, action):
        return self.set_state([self.count + 1, self.position + 0.6 * float(action[0])]), 1.0, abs(self.position) >= 1, False, {}

    def get_state(self):
        return np.array([self.count, self.position])

    def set_state(self, state):
        self.count, self.position = int(state[0]), float(np.float32(state[1]))
        return np.array([self.count, self.position], dtype=np.float32)


gym.register("Counter-v0", Counter, max_episode_steps=HORIZON)


@pytest.fixture(autouse=True)
def unchanged_torch_settings():
    """What a training sets for its whole process."""
    yield
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(scope="session")
def demo_files(tmp_path_factory):
    """Small demonstrations, by task: a clumsy Hopper that falls within 40 steps, and a Counter that always moves right."""
    folder, rng = tmp_path_factory.mktemp("demos"), np.random.default_rng(0)
    policies = {HOPPER: lambda observation: rng.uniform(-0.2, 0.2, 3)}
    policies["Counter-v0"] = lambda observation: np.float32([0.8 if observation[1] < 0.5 else 0.0])
    for env_id, policy in policies.items():
        save(folder / f"{env_id}.npz", record(make_env(env_id, seed=7), policy, 5, "a test"))
    return {env_id: folder / f"{env_id}.npz" for env_id in policies}


@pytest.fixture(scope="session")
def hopper_demos(demo_files):
    return load(demo_files[HOPPER], make_env(HOPPER))


def learned(state):
    """The names of a network's state that training moves: not an action's range, nor what the demonstrations fix once and for all."""
    return [name for name in state if name not in ("scale", "bias") and not name.endswith((".center", ".spread"))]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def assert_close(actual, expected, rtol=1e-5, atol=1e-6):
    actual, expected = (np.asarray(x.detach() if isinstance(x, torch.Tensor) else x) for x in (actual, expected))
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol)


def box(low, high):
    return gym.spaces.Box(np.float32(low), np.float32(high))


def chi_square(counts, probabilities):
    """In standard deviations above its mean."""
    expected, df = counts.sum() * probabilities, len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum() - df) / np.sqrt(2 * df)


# ------------------------------------------------------------------------------------------------------------------------------ whole trainings


@pytest.fixture(scope="session")
def tiny(demo_files):
    """Arguments of a training of a second, past the first updates, with a buffer that the last iteration overwrites in part."""

    def tiny(env_id="Counter-v0", module=filter_br, **changes):
        small = {"n_demos": 3, "n_validation_demos": 2, "total_timesteps": 600, "iteration_timesteps": 200, "eval_every": 1, "eval_episodes": 2}
        small |= {"final_eval_episodes": 3, "cloning_steps": 20, "critic_warmup": 6}
        small |= {"buffer_size": 500, "batch_size": 32, "train_freq": 32, "gradient_steps": 4, "learning_starts": 64, "disc_batch_size": 64}
        small |= {"total_gradient_steps": 60, "iteration_gradient_steps": 20, "demos": str(demo_files.get(env_id, ""))}
        names = {field.name for field in dataclasses.fields(module.Args)}
        return module.Args(env_id=env_id, **({name: value for name, value in small.items() if name in names} | changes))

    return tiny


def module_of(args):
    """The script whose arguments they are."""
    return sys.modules[type(args).__module__]


def run(args, folder):
    """Train, without drawing; returns the last checkpoint."""
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_of(args), "plot_learning_curve", lambda *arguments: None)
        module_of(args).train(args, folder)
    return checkpoint(folder)


def checkpoint(folder):
    """All that a resume starts from, but the clock."""
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert saved["counts"].pop("seconds") > 0
    return saved


def metrics(folder, without=("charts/seconds",)):
    with open(folder / "metrics.csv", newline="") as file:
        return [{name: value for name, value in row.items() if name not in without} for row in csv.DictReader(file)]


def column(folder, name):
    return np.array([float(row[name]) for row in metrics(folder, without=())])


def constant_evaluation(env, act, n_episodes, validation_error=None):
    """In place of utils.envs.evaluate, where it would only take time."""
    return dict.fromkeys(("return", "return_std", "length", *(["validation_error"] if validation_error else [])), 0.5)


def same(a, b):
    """Equal to the bit, in all that a checkpoint nests."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a if name != "seconds")  # of wall time
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


class Interrupted(Exception):
    pass


def interrupt(patch, name, nth):
    """The nth call of filter_br.<name> never happens."""
    owner, name = (filter_br.Log, "write") if name == "Log.write" else (filter_br, name)
    real, calls = getattr(owner, name), iter(range(1, 10_000))

    def wrapped(*arguments, **options):
        if next(calls) == nth:
            raise Interrupted
        return real(*arguments, **options)

    patch.setattr(owner, name, wrapped)


def interrupt_file(patch, name, nth, error=Interrupted):
    """The nth version of the file `name` is written under its temporary name, and never takes the file's place."""
    replace, calls = os.replace, iter(range(1, 10_000))

    def wrapped(temporary, path):
        if os.path.basename(path) == name and next(calls) == nth:
            raise error
        return replace(temporary, path)

    patch.setattr(os, "replace", wrapped)


# --------------------------------------------------------------------------------------------------------------------------------- command line


@pytest.fixture
def checkout(tmp_path):
    """A copy of the scripts, so that runs/ is this test's own."""
    for name in ("algos", "utils"):
        shutil.copytree(ROOT / name, tmp_path / "checkout" / name, ignore=shutil.ignore_patterns("data", "__pycache__"))
    return tmp_path / "checkout"


def flags(args):
    changed = {field.name: getattr(args, field.name) for field in dataclasses.fields(args) if getattr(args, field.name) != field.default}
    return [part for name, value in changed.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def command(checkout, *arguments, script="filter_br"):
    """`python algos/SCRIPT.py ARGUMENTS`, in this process, which has torch loaded. Returns what it exits with: None, a status, or a message."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{script}.py", *map(str, arguments)])
        patch.setattr(sys, "path", sys.path[:])
        patch.chdir(checkout)
        try:
            runpy.run_path(str(checkout / "algos" / f"{script}.py"), run_name="__main__")
        except SystemExit as exit:
            return exit.code
    return None
