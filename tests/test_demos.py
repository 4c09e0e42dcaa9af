"""Demonstrations: what is written is what is read, what cannot be trained on is refused by name, and every recorded step can be taken again."""

import copy
import dataclasses
import json
import pickle
import signal
import subprocess
import sys
import types
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from utils import demos as module
from utils.demos import Demos, DemosError, ValidationError, load, load_split, read, record, save
from utils.envs import make_env, roll_out, set_state

ROOT = Path(__file__).resolve().parents[1]
ENV_ID = "HopperBulletEnv-v0"
HORIZON = 20


def synthetic(lengths, d=5, k=2, m=9, **changes):
    """Demos of these lengths, of float64 numbers that are all different."""
    n, rng = sum(lengths), np.random.default_rng(0)
    ends = np.isin(np.arange(n), np.cumsum(lengths) - 1)
    steps = np.concatenate([np.arange(length) for length in lengths])
    fields = dict(
        observations=rng.normal(size=(n, d)),
        actions=rng.uniform(-1, 1, size=(n, k)),
        rewards=rng.normal(size=n),
        terminated=ends & (steps % 2 == 0),
        truncated=ends & (steps % 2 == 1),
        final_observations=rng.normal(size=(len(lengths), d)),
        episode_starts=np.cumsum([0, *lengths]),
        states=np.column_stack([steps, rng.normal(size=(n, m - 1))]),
        reset_seeds=np.arange(len(lengths)) + 2**31,
        env_id="Synthetic-v0",
        made_by="a test",
    )
    return Demos(**(fields | changes))


def assert_same(a, b):
    for field in dataclasses.fields(Demos):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, np.ndarray):
            assert x.dtype == y.dtype and x.shape == y.shape, field.name
            assert np.array_equal(x.view(np.uint8), y.view(np.uint8)), field.name
        else:
            assert x == y, field.name


@pytest.fixture(scope="module")
def env():
    return make_env(ENV_ID, seed=1, horizon=HORIZON)


@pytest.fixture(scope="module")
def hopper():
    """8 short episodes of random actions, recorded with a trembling hand: some fall, some reach the horizon."""
    rng = np.random.default_rng(0)
    env = make_env(ENV_ID, p_tremble=0.3, seed=5, horizon=HORIZON)
    demos = record(env, lambda observation: rng.uniform(-0.3, 0.3, 3), 8, "a test")
    assert demos.terminated.any() and demos.truncated.any() and len(demos.rewards) < module.CHECKED_STEPS
    return demos


def write(path, demos, **changes):
    """A file with these arrays, unchecked; None leaves one out."""
    arrays = {name: value for name, value in (vars(demos) | changes).items() if value is not None}
    np.savez(path, **arrays)
    return path


def refusal(path, env=None, **options):
    """The message with which `path` is refused; it must name the file, and be one line."""
    with pytest.raises(DemosError) as error:
        load(path, env, **options) if env else read(path)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)
    return str(error.value).removeprefix(f"{path}: ")


def command(*arguments):
    return subprocess.run([sys.executable, "utils/demos.py", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=60)


# ------------------------------------------------------------------------------------------------------------------------------- the format


def test_unequal_lengths_come_back_as_they_were(tmp_path):
    demos = synthetic((1000, 412, 87))
    save(tmp_path / "demos.npz", demos)
    with np.load(tmp_path / "demos.npz", allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    assert all(array.dtype.kind in "fiubU" and array.ndim <= 2 for array in arrays.values())
    assert "executed_actions" not in arrays  # the same as `actions`
    again = read(tmp_path / "demos.npz")
    assert_same(again, demos)
    rng = np.random.default_rng(0)
    observations = rng.normal(size=(1499, 5))
    actions, rewards = rng.uniform(-1, 1, size=(1499, 2)), rng.normal(size=1499)
    assert again.observations.dtype == again.actions.dtype == again.final_observations.dtype == np.float32
    assert np.array_equal(again.observations, observations.astype(np.float32)) and np.array_equal(again.actions, actions.astype(np.float32))
    assert np.array_equal(again.rewards, rewards) and again.rewards.dtype == again.states.dtype == np.float64
    assert again.lengths.tolist() == [1000, 412, 87] and again.n_episodes == 3
    assert again.returns == pytest.approx([rewards[:1000].sum(), rewards[1000:1412].sum(), rewards[1412:].sum()], abs=1e-9)
    assert again.observations.flags.c_contiguous and again.states.flags.c_contiguous  # a row at a time is how they are read


def test_next_observations_never_join_two_episodes():
    demos = synthetic((3, 1, 2))
    o, final = demos.observations, demos.final_observations
    assert np.array_equal(demos.next_observations, [o[1], o[2], final[0], final[1], o[5], final[2]])


def test_states_are_stored_without_the_observation_that_they_repeat(tmp_path):
    demos = synthetic((7, 3))
    demos.states[:, -5:] = demos.observations
    save(tmp_path / "demos.npz", demos)
    assert dict(np.load(tmp_path / "demos.npz"))["states"].shape == (10, 4)
    assert_same(read(tmp_path / "demos.npz"), demos)


def test_executed_and_discrete_actions_come_back(tmp_path):
    actions = np.arange(10) % 3
    demos = synthetic((7, 3), actions=actions, executed_actions=actions[::-1].copy())
    save(tmp_path / "demos.npz", demos)
    again = read(tmp_path / "demos.npz")
    assert again.actions.dtype == again.executed_actions.dtype == np.int64
    assert again.actions.tolist() == actions.tolist() and again.executed_actions.tolist() == actions[::-1].tolist()


def test_what_may_be_left_out(tmp_path):
    optional = ("states", "executed_actions", "reset_seeds", "p_tremble", "made_by", "versions")
    demos = read(write(tmp_path / "demos.npz", synthetic((7, 3)), **dict.fromkeys(optional)))
    assert demos.states is None and demos.reset_seeds.tolist() == [-1, -1] and demos.p_tremble == 0 and demos.made_by == "unknown"
    assert np.array_equal(demos.executed_actions, demos.actions)


def test_subset_takes_whole_episodes_in_order():
    demos = synthetic((3, 1, 2))
    picked = demos.subset([2, 0])
    assert picked.lengths.tolist() == [2, 3] and picked.reset_seeds.tolist() == [2**31 + 2, 2**31]
    for name in module.PER_STEP:
        assert np.array_equal(getattr(picked, name), getattr(demos, name)[[4, 5, 0, 1, 2]]), name
    assert np.array_equal(picked.next_observations, demos.next_observations[[4, 5, 0, 1, 2]])


def test_an_existing_file_is_not_overwritten(tmp_path):
    path = tmp_path / "demos.npz"
    path.write_bytes(b"precious")
    with pytest.raises(DemosError, match="demos.npz: exists and is not overwritten"):
        save(path, synthetic((3,)))
    assert path.read_bytes() == b"precious"


def test_unfit_demonstrations_are_not_written(tmp_path):
    demos = synthetic((3, 3))
    demos.actions[4, 1] = np.nan
    with pytest.raises(DemosError, match=r"actions has a NaN or an infinity in row 4 \(episode 1, step 1\)"):
        save(tmp_path / "demos.npz", demos)
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_is_killed_leaves_no_file_under_the_final_name(tmp_path):
    program = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import numpy as np
from tests.test_demos import synthetic, save
def half(file, **arrays):
    file.write(b"PK half a file")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
np.savez_compressed = half
save({str(tmp_path / "demos.npz")!r}, synthetic((3,)))
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1 and not list(tmp_path.glob("*.npz"))
    save(tmp_path / "demos.npz", synthetic((3,)))
    assert read(tmp_path / "demos.npz").lengths.tolist() == [3]


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def no_space(file, **arrays):
        raise OSError("No space left on device")

    monkeypatch.setattr(np, "savez_compressed", no_space)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path / "demos.npz", synthetic((3,)))
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------------------------------------------------- recording


def test_every_recorded_step_can_be_taken_again_to_the_bit(hopper):
    env = make_env(ENV_ID, seed=9, horizon=HORIZON)
    env.reset()
    for row in np.random.default_rng(1).permutation(len(hopper.rewards)):
        episode = np.searchsorted(hopper.episode_starts, row, side="right") - 1
        last = row == hopper.episode_starts[episode + 1] - 1
        following = hopper.final_observations[episode] if last else hopper.observations[row + 1]
        assert np.array_equal(set_state(env, hopper.states[row]), hopper.observations[row])
        observation, reward, terminated, truncated, _ = env.step(hopper.executed_actions[row])
        assert np.array_equal(observation, following)
        assert (reward, terminated, truncated) == (hopper.rewards[row], hopper.terminated[row], hopper.truncated[row])


def test_record_keeps_both_actions_and_who_what_where(hopper):
    trembled = (hopper.actions != hopper.executed_actions).any(axis=1)
    assert 0.15 < trembled.mean() < 0.45
    rng = np.random.default_rng(0)
    assert np.array_equal(hopper.actions, np.array([rng.uniform(-0.3, 0.3, 3) for _ in hopper.rewards], dtype=np.float32))
    assert hopper.n_episodes == 8 and (hopper.env_id, hopper.p_tremble, hopper.made_by) == (ENV_ID, 0.3, "a test")
    assert json.loads(hopper.versions)["pybullet"].startswith("3.")
    assert np.array_equal(hopper.truncated[hopper.episode_starts[1:] - 1], hopper.lengths == HORIZON)
    env = make_env(ENV_ID)
    for episode in (3, 0):
        assert np.array_equal(env.reset(seed=int(hopper.reset_seeds[episode]))[0], hopper.observations[hopper.episode_starts[episode]])


def test_actions_out_of_bounds_are_not_recorded(env):
    """The first one is refused, before the episode goes on."""
    with pytest.raises(DemosError, match=r"^recording: the policy's action \[0. 2. 0.\] in step 3 of episode 0 is not in Box\(-1.0, 1.0, \(3,\), float32\)$"):
        record(env, lambda observation: np.array([0.0, 2.0 * (env.t == 3), 0.0]), 1, "a test")
    assert env.t == 3
    with pytest.raises(DemosError, match="action 0.9 in step 0 of episode 0 is not in Discrete"):  # and is not recorded as 0
        record(make_env("CartPole-v1"), lambda observation: 0.9, 1, "a test")


def test_observations_of_another_size_than_the_task_says_are_not_recorded():
    """A mistake in a task of one's own, which would otherwise be seen only when the file is loaded."""
    env = make_env("Pendulum-v1", horizon=5)
    env.observation_space = gym.spaces.Box(-10, 10, (4,))
    with pytest.raises(DemosError, match=r"^recorded demonstrations: observations has the shape \(5, 3\) and Pendulum-v1 has \(4,\) a step"):
        record(env, lambda observation: np.zeros(1), 1, "a test")


# ----------------------------------------------------------------------------------------------------------------------------------- loading


def generators_of(env):
    return [copy.deepcopy(env.state_dict()[name]) for name in ("start", "tremble")]


def test_load_returns_the_first_demonstrations_and_disturbs_nothing(tmp_path, hopper):
    save(tmp_path / "demos.npz", hopper)
    env = make_env(ENV_ID, p_tremble=0.5, seed=3, horizon=HORIZON)
    generators = generators_of(env)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(load(tmp_path / "demos.npz", env), hopper)
        assert_same(load(tmp_path / "demos.npz", env, n_demos=2), hopper.subset([0, 1]))
    assert generators_of(env) == generators and env.p_tremble == 0.5
    assert np.array_equal(env.reset()[0], make_env(ENV_ID, p_tremble=0.5, seed=3).reset()[0])


def changed(array, index, value):
    array = array.copy()
    array[index] = value
    return array


RAGGED = np.array([[0.1], [0.2, 0.3]], dtype=object)
UNREADABLE = {  # name: (how the file is made, what the message says)
    "missing": (lambda path, demos: None, "no such file"),
    "empty": (lambda path, demos: path.write_bytes(b""), "truncated or damaged"),
    "text": (lambda path, demos: path.write_text("not demonstrations"), "not an .npz of plain arrays"),
    "pickled file": (lambda path, demos: path.write_bytes(pickle.dumps({"observations": [1.0]})), "pickled content can run code"),
    "one array": (lambda path, demos: np.save(open(path, "wb"), np.zeros(3)), "not an .npz of plain arrays"),
    "object array": (lambda path, demos: write(path, demos, actions=RAGGED), "pickled content can run code"),
    "strings": (lambda path, demos: write(path, demos, actions=np.full(demos.actions.shape, "left")), "something of the wrong kind"),
    "versions": (lambda path, demos: write(path, demos, versions="pybullet 3"), "something of the wrong kind"),
    "no states": (lambda path, demos: write(path, demos, states=None, states_end_with_observation=True), "something of the wrong kind ('states')"),
    "no actions": (lambda path, demos: write(path, demos, actions=None, terminated=None), "lacks actions, terminated"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_files_are_refused(tmp_path, name):
    make, expected = UNREADABLE[name]
    make(tmp_path / "demos.npz", synthetic((7, 3)))
    assert expected in refusal(tmp_path / "demos.npz")


def test_pickled_content_is_never_executed(tmp_path):
    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "exploded",)

    (tmp_path / "demos.npz").write_bytes(pickle.dumps(Bomb()))
    refusal(tmp_path / "demos.npz")
    write(tmp_path / "demos.npz", synthetic((7, 3)), made_by=np.array([Bomb()], dtype=object))
    refusal(tmp_path / "demos.npz")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("fraction", (0.01, 0.5, 0.99))
def test_truncated_and_damaged_files_are_refused(tmp_path, fraction):
    path = tmp_path / "demos.npz"
    save(path, synthetic((70, 30)))
    whole = path.read_bytes()
    position = int(fraction * len(whole))
    path.write_bytes(whole[:position])
    assert "truncated or damaged" in refusal(path)
    if fraction == 0.5:  # one byte inside an array
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 255]) + whole[position + 1 :])
        assert "truncated or damaged" in refusal(path)


WRONG_ARRAYS = {  # name: (changed arrays, what the message says)
    "NaN": (lambda d: {"observations": changed(d.observations, (17, 2), np.nan)}, "observations has a NaN or an infinity in row 17 (episode 1"),
    "inf": (lambda d: {"actions": changed(d.actions, (9, 0), np.inf)}, "actions has a NaN or an infinity in row 9 (episode 0, step 9)"),
    "NaN state": (lambda d: {"states": changed(d.states, (3, 4), np.nan)}, "states has a NaN or an infinity in row 3 (episode 0, step 3)"),
    "NaN reward": (lambda d: {"rewards": changed(d.rewards, 10, np.nan)}, "rewards has a NaN or an infinity in row 10 (episode 1, step 0)"),
    "NaN end": (lambda d: {"final_observations": changed(d.final_observations, (1, 0), np.nan)}, "has a NaN or an infinity in row 1:"),
    "above float32": (lambda d: {"observations": changed(d.observations.astype(float), (5, 0), 1e300)}, "a NaN or an infinity in row 5 "),
    "extra action": (lambda d: {"actions": np.vstack([d.actions, d.actions[:1]])}, "actions has the shape (26, 2) and needs (25, 2)"),
    "lost state": (lambda d: {"states": d.states[:-1]}, "states has the shape (24, 9) and needs (25, 9)"),
    "reward column": (lambda d: {"rewards": d.rewards[:, None]}, "rewards has the shape (25, 1) and needs (25,)"),
    "all are final": (lambda d: {"final_observations": d.observations}, "final_observations has the shape (25, 5) and needs (3, 5)"),
    "final size": (lambda d: {"final_observations": d.final_observations[:, :4]}, "final_observations has the shape (3, 4) and needs (3, 5)"),
    "flat": (lambda d: {"observations": d.observations[:, 0]}, "observations has the shape (25,) and needs (25, 1)"),
    "executed": (lambda d: {"executed_actions": d.actions[:, :1]}, "executed_actions has the shape (25, 1) and needs (25, 2)"),
    "offsets fall": (lambda d: {"episode_starts": [0, 10, 10, 25]}, "the number of steps, 25, but entry 2 is 10"),
    "offsets start late": (lambda d: {"episode_starts": [1, 10, 22, 25]}, "but entry 0 is 1"),
    "offsets end early": (lambda d: {"episode_starts": [0, 10, 22, 24]}, "but entry 3 is 24"),
    "no state": (lambda d: {"states": d.states[:, :0]}, "states has the shape (25, 0) and needs (25, 1)"),
    "offsets in a column": (lambda d: {"episode_starts": d.episode_starts[:, None]}, "episode_starts has the shape (4, 1) and needs one dimension"),
    "offsets in between": (lambda d: {"episode_starts": [0, 9.5, 22, 25]}, "episode_starts has to be int64, and has other numbers"),
    "an end that may be": (lambda d: {"terminated": changed(d.terminated.astype(float), 4, np.nan)}, "terminated has to be bool, and has other numbers"),
    "no episode": (lambda d: {"episode_starts": [0]}, "holds no demonstrations"),
    "no offset": (lambda d: {"episode_starts": np.zeros(0, int)}, "holds no demonstrations"),
    "no step": (lambda d: {name: getattr(d, name)[:0] for name in module.PER_STEP}, "holds no demonstrations"),
    "end inside": (lambda d: {"terminated": changed(d.terminated, 4, True)}, "row 4 (episode 0, step 4) is not the last of its episode but"),
    "no end": (lambda d: {"truncated": changed(d.truncated, 9, False)}, "row 9 (episode 0, step 9) is the last of its episode but neither"),
    "time step": (lambda d: {"states": changed(d.states, (12, 0), 3)}, "the state of row 12 (episode 1, step 2) says time step 3"),
}


@pytest.mark.parametrize("name", WRONG_ARRAYS)
def test_arrays_that_do_not_fit_together_are_refused(tmp_path, name):
    change, expected = WRONG_ARRAYS[name]
    demos = synthetic((10, 12, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's own, on 1e300 becoming infinite
        assert expected in refusal(write(tmp_path / "demos.npz", demos, **change(demos)))


WRONG_FOR_HOPPER = {
    "task": (lambda d: {"env_id": "Ant-v5"}, "was made in Ant-v5 and not in HopperBulletEnv-v0: give --env-id Ant-v5"),
    "action": (lambda d: {"actions": changed(d.actions, (5, 1), 1.7)}, "actions has 1.7 in row 5 (episode 0, step 5), outside [-1, 1]"),
    "executed action": (lambda d: {"executed_actions": changed(d.actions, (2, 0), -1.5)}, "executed_actions has -1.5 in row 2 (episode 0, step 2)"),
    "integer actions": (lambda d: {"actions": d.actions.astype(int)}, "actions are int64 and HopperBulletEnv-v0 takes float32"),
    "observations": (lambda d: {k: getattr(d, k)[:, 1:] for k in ("observations", "final_observations")}, "14) and HopperBulletEnv-v0 has (15,)"),
    "actions": (lambda d: {"actions": d.actions[:, :2], "executed_actions": None}, "2) and HopperBulletEnv-v0 has (3,) a step"),
    "states": (lambda d: {"states": d.states[:, :-1]}, "51) and HopperBulletEnv-v0 has (52,) a step"),
    "shifted states": (lambda d: {"states": np.column_stack([d.states[:, 0], np.roll(d.states[:, 1:], 1, axis=0)])}, "does not reproduce it"),
}


@pytest.mark.parametrize("name", WRONG_FOR_HOPPER)
def test_demonstrations_of_something_else_are_refused(tmp_path, env, hopper, name):
    change, expected = WRONG_FOR_HOPPER[name]
    assert expected in refusal(write(tmp_path / "demos.npz", hopper, **change(hopper)), env)


def test_too_few_demonstrations_and_too_long_ones_are_refused(tmp_path, env, hopper):
    save(tmp_path / "demos.npz", hopper)
    assert "holds 8 demonstrations and --n-demos asks for 25: give 1 to 8" in refusal(tmp_path / "demos.npz", env, n_demos=25)
    assert "--n-demos asks for 0" in refusal(tmp_path / "demos.npz", env, n_demos=0)
    short = make_env(ENV_ID, horizon=HORIZON - 1)
    episode = hopper.lengths.argmax()
    assert f"episode {episode} has 20 steps and the horizon is 19: give a horizon of at least 20" in refusal(tmp_path / "demos.npz", short)


def test_float_actions_of_a_discrete_task_are_refused():
    env = types.SimpleNamespace(unwrapped=types.SimpleNamespace(spec=types.SimpleNamespace(id="Synthetic-v0")), action_space=gym.spaces.Discrete(3))
    with pytest.raises(DemosError, match="demos.npz: actions are float32 and Synthetic-v0 takes int64"):
        module.check_fits(synthetic((3,)), env, "demos.npz")


def test_actions_at_bounds_that_float32_does_not_hold():
    """The greatest action of a float64 task is 0.1, and is stored as the float32 above it; the next one is too much."""
    env = make_env("MountainCarContinuous-v0")
    env.action_space = gym.spaces.Box(-0.1, 0.1, (1,), np.float64)
    demos = record(env, lambda observation: np.array([0.1]), 1, "a test")
    assert demos.actions.max() == np.float32(0.1) and float(demos.actions.max()) > 0.1
    demos.actions[3] = np.nextafter(np.float32(0.1), np.float32(1))
    with pytest.raises(DemosError, match="actions has 0.1 in row 3 "):
        module.check_fits(demos, env, "demos.npz")


def test_a_step_that_the_environment_does_not_repeat_is_refused_with_its_row(tmp_path, env, hopper):
    states = hopper.states.copy()
    states[33, 16] += 1e-3  # the velocity of the hopper's first slide
    path = write(tmp_path / "state.npz", hopper, states=states)
    message = refusal(path, env)
    assert "HopperBulletEnv-v0 does not reproduce it" in message and hopper.where(33) in message and "1 not equal to the bit" in message
    assert "versions then and now: the same" in message
    load(path, env, check_dynamics=False)

    versions = json.dumps(json.loads(hopper.versions) | {"pybullet": "3.2.1"})
    path = write(tmp_path / "reward.npz", hopper, rewards=changed(hopper.rewards, 12, hopper.rewards[12] + 0.25), versions=versions)
    message = refusal(path, env)
    worst = 0.25 / max(1, abs(hopper.rewards[12] + 0.25))
    assert f"greatest error {worst:.3g} in the reward of {hopper.where(12)}" in message and "pybullet 3.2.1 -> 3." in message

    end = hopper.episode_starts[3] - 1
    flags = dict(terminated=changed(hopper.terminated, end, not hopper.terminated[end]), truncated=changed(hopper.truncated, end, True))
    path = write(tmp_path / "flag.npz", hopper, **flags)
    assert f"greatest error 1 in the terminated of {hopper.where(end)}" in refusal(path, env)


def test_observations_before_and_after_a_step_are_both_compared(tmp_path, env, hopper):
    start, end = hopper.episode_starts[2], hopper.episode_starts[5] - 1
    path = write(tmp_path / "before.npz", hopper, observations=changed(hopper.observations, (start, 3), 0.5))
    assert f"in the restored observation[3] of {hopper.where(start)}" in refusal(path, env)
    path = write(tmp_path / "after.npz", hopper, final_observations=changed(hopper.final_observations, (4, 6), 0.5))
    assert f"in the next observation[6] of {hopper.where(end)}" in refusal(path, env)


def test_a_simulator_that_gives_nan_is_refused(tmp_path, env, hopper, monkeypatch):
    save(tmp_path / "demos.npz", hopper)
    monkeypatch.setattr(env, "step", lambda action: (np.full(15, np.nan), 0.0, False, False, {}))
    assert "greatest error inf in the next observation[0]" in refusal(tmp_path / "demos.npz", env)


def test_a_difference_in_the_last_digit_is_accepted_with_a_warning(tmp_path, env, hopper):
    path = write(tmp_path / "demos.npz", hopper, rewards=changed(hopper.rewards, 12, hopper.rewards[12] + 5e-7))
    with pytest.warns(UserWarning, match="demos.npz: .* 1 not equal to the bit, greatest error .*e-07 in the reward of row 12 "):
        load(path, env)


def test_an_environment_with_other_dynamics_is_refused(tmp_path, hopper):
    save(tmp_path / "demos.npz", hopper)
    env = make_env(ENV_ID, horizon=HORIZON)
    env.unwrapped.robot.power *= 1.01
    assert "does not reproduce it" in refusal(tmp_path / "demos.npz", env)


# --------------------------------------------------------------------------------------------------------------------------- foreign data sets


def test_without_states_it_loads_and_says_what_still_works(tmp_path, env, hopper):
    demos = load(write(tmp_path / "demos.npz", hopper, states=None), env)
    with pytest.raises(DemosError, match=r"demos.npz: has no simulator states, and --alpha 0.5 resets .*: use algos/mm_gail_ipm.py .* or algos/bc.py"):
        demos.need_states("demos.npz", "--alpha 0.5")
    hopper.need_states("demos.npz", "--alpha 0.5")


def test_a_minari_data_set_without_minari_is_answered_with_the_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "minari", None)
    for source in ("mujoco/hopper/expert-v0", "minari:mujoco/hopper/expert-v0"):
        assert 'pip install "minari[hf,hdf5]"' in refusal(source)


def test_a_minari_data_set_is_converted(monkeypatch):
    def episode(length, terminated, truncated):
        flags = [np.append(np.zeros(length - 1, bool), flag) for flag in (terminated, truncated)]
        return types.SimpleNamespace(
            observations=np.arange(length + 1.0)[:, None] + [[10 * length, 0.5]],
            actions=np.full((length, 1), length / 10),
            rewards=np.full(length, float(length)),
            terminations=flags[0],
            truncations=flags[1],
        )

    episodes = [episode(3, True, False), episode(2, False, True), episode(4, False, False)]
    dataset = types.SimpleNamespace(iterate_episodes=lambda: iter(episodes), env_spec=types.SimpleNamespace(id="Hopper-v5"))
    asked = []
    fake = types.SimpleNamespace(load_dataset=lambda dataset_id, download: asked.append((dataset_id, download)) or dataset)
    monkeypatch.setitem(sys.modules, "minari", fake)
    demos = read("minari:mujoco/hopper/expert-v0")
    assert asked == [("mujoco/hopper/expert-v0", True)]
    assert demos.lengths.tolist() == [3, 2, 4] and demos.returns.tolist() == [9, 4, 16] and demos.env_id == "Hopper-v5" and demos.states is None
    assert demos.observations[:, 0].tolist() == [30, 31, 32, 20, 21, 40, 41, 42, 43] and demos.final_observations[:, 0].tolist() == [33, 22, 44]
    assert np.flatnonzero(demos.terminated).tolist() == [2] and np.flatnonzero(demos.truncated).tolist() == [4, 8]  # the last one was merely left off
    episodes[1].observations = episodes[1].observations[:-1]
    assert "episode 1 lacks a flat observation" in refusal("mujoco/hopper/expert-v0")
    fake.load_dataset = None
    assert "Minari cannot load it" in refusal("mujoco/hopper/expert-v0")


# -------------------------------------------------------------------------------------------------------------------------------- the commands


def test_inspect_prints_the_numbers(tmp_path):
    demos = synthetic((10, 12, 3), p_tremble=0.25, versions='{"numpy": "2.9"}')
    demos.executed_actions = changed(demos.actions, [4, 7], 0.5)
    demos.observations[:, 3] = 2.5
    save(tmp_path / "demos.npz", demos)
    result = command("inspect", tmp_path / "demos.npz")
    assert result.returncode == 0, result.stderr
    lines = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.strip()}
    assert lines["length"][1:] == ["3", "8.33333", "12"]
    assert lines["return"][1:] == [f"{value:.6g}" for value in (demos.returns.min(), demos.returns.mean(), demos.returns.max())]
    column = demos.actions[:, 1].astype(np.float64)
    assert lines["action[1]"][1:] == [f"{value:.6g}" for value in (column.min(), column.mean(), column.max())]
    assert lines["observation[3]"][1:] == ["2.5", "2.5", "2.5", "constant"] and len(lines["observation[2]"]) == 4
    assert "Synthetic-v0, p_tremble 0.25, 2 trembled steps" in result.stdout and "9 numbers a step" in result.stdout
    assert "3 of 25 steps in all, 1 terminated, 2 truncated" in result.stdout and "numpy 2.9" in result.stdout and "a test" in result.stdout


def test_verify_prints_the_greatest_error_and_fails_above_the_tolerance(tmp_path, hopper):
    n = len(hopper.rewards)
    save(tmp_path / "good.npz", hopper)
    result = command("verify", tmp_path / "good.npz")
    assert result.returncode == 0, result.stderr
    assert f"good.npz: {n} of {n} steps replayed, 0 not equal to the bit, greatest error 0\n" in result.stdout

    rewards = changed(hopper.rewards, 21, hopper.rewards[21] + 0.25)
    bad = write(tmp_path / "bad.npz", hopper, rewards=rewards)
    worst = 0.25 / max(1, abs(rewards[21]))
    expected = f"{n} of {n} steps replayed, 1 not equal to the bit, greatest error {worst:.3g} in the reward of {hopper.where(21)}"
    result = command("verify", bad)
    assert result.returncode == 1 and expected in result.stderr and "Traceback" not in result.stderr
    result = command("verify", bad, "--tolerance", 0.5)
    assert result.returncode == 0 and expected in result.stdout


def test_the_commands_refuse_in_one_sentence(tmp_path, hopper):
    result = command("verify", write(tmp_path / "foreign.npz", hopper, states=None))
    assert result.returncode == 1 and "foreign.npz: has no simulator states" in result.stderr and "Traceback" not in result.stderr
    assert result.stderr.strip().endswith(": record with utils/demos.py")  # no script makes up for it here
    result = command("inspect", tmp_path / "nothing.npz")
    assert result.returncode == 1 and "nothing.npz: no such file" in result.stderr and "Traceback" not in result.stderr


# ------------------------------------------------------------------------------------------------------------------------------------ what is shipped

SHIPPED = sorted((Path(__file__).parents[1] / "utils" / "data").glob("*.npz"))


def test_something_is_shipped_for_the_first_command_of_the_readme():
    assert "HopperBulletEnv-v0" in [path.stem for path in SHIPPED]


@pytest.mark.parametrize("notes", ["[]", "{", '{"returns": 3}', '{"returns": {"0": 5}}'])
def test_notes_of_something_else_beside_the_file(notes, tmp_path, hopper, env):
    path = write(tmp_path / "mine.npz", hopper)
    path.with_suffix(".json").write_text(notes)
    with pytest.raises(DemosError, match=r"mine.json: is not the notes that utils/train_expert.py writes beside demonstrations: rename or move it$"):
        load_split(path, env, 1, 1)


@pytest.mark.parametrize(("horizon", "evaluation_horizon", "warned"), [(200, 200, [0, 1]), (100, 200, [1]), (200, 100, [0]), (100, 100, []), (101, 101, [])])
def test_demonstrations_that_stop_before_the_horizon_without_an_end(horizon, evaluation_horizon, warned, tmp_path):
    """Half of the task's steps: to the validation error, a policy that goes on would be the one that differs."""
    path, act = tmp_path / "half.npz", lambda observation: np.zeros(1)
    save(path, record(make_env("Pendulum-v1", horizon=100), act, 3, "a test"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, validation_demos, _ = load_split(path, make_env("Pendulum-v1", horizon=horizon), 2, 1, make_env("Pendulum-v1", horizon=evaluation_horizon))
    sentences = [
        f"{path}: of 2 demonstrations to train on 2 stop before the horizon of 200 steps; --payoff sum takes that for an early end",
        f"{path}: of 1 demonstrations to select by 1 stop before the horizon of 200 steps; the validation error takes that for an early end",
    ]
    said = [str(warning.message).split(":", 2)[:2] for warning in caught if "early end" in str(warning.message)]
    assert [":".join(words) for words in said] == [sentences[i] for i in warned]
    whole, half = (roll_out(make_env("Pendulum-v1", horizon=steps), act, 1)[0] for steps in (200, 100))
    error = ValidationError(validation_demos, 200)
    assert error(half) < 0.3 < 0.7 < error(whole)  # which is what the warning is about


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_demonstrations(path):
    """They replay here, split into 25 and 5 different episodes, and their notes say what their expert is worth in the trembling environment."""
    env = make_env(path.stem, p_tremble=0.1)
    demos, validation, references = load_split("", env, 25, 5)
    assert (demos.n_episodes, validation.n_episodes) == (25, 5) and demos.p_tremble == 0
    assert not set(demos.reset_seeds) & set(validation.reset_seeds)
    notes = json.loads(path.with_suffix(".json").read_text())
    assert references == {"expert (p_tremble 0.1)": notes["returns"]["0.1"]["mean"]}
    everything = np.concatenate([demos.returns, validation.returns])
    low, high = (notes["returns"]["0"]["mean"] + sign * 4 * notes["returns"]["0"]["std"] / 30**0.5 for sign in (-1, 1))
    assert low < everything.mean() < high
