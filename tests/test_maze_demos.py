"""How maze demonstrations are made: shortest paths, the walker's symmetry, a training that resumes, and files that say what they hold."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

mujoco = pytest.importorskip("mujoco", reason='needs pip install "mujoco>=3.1.6,<4" imageio')
h5py = pytest.importorskip("h5py", reason="needs pip install h5py")
from utils import make_maze_demos as module
from utils.demos import check_replay, load
from utils.envs import make_env
from utils.make_maze_demos import ANKLE_SIGNS, Args, Walk, from_walk_frame, push, record, rotation, shortest_path, to_walk_frame, waypoint
from utils.mazes import LAYOUTS, AntMaze, find

POINT = "PointMaze_Large-v0"
ARGS = Args(total_timesteps=120, eval_every=40, episode_length=15, learning_starts=20, train_freq=10, gradient_steps=2, batch_size=8)


@pytest.mark.parametrize("name, n_steps", [("umaze", 6), ("medium", 10), ("large", 14)])
def test_shortest_paths(name, n_steps):
    """Lengths counted by hand; every step is to a free neighbour; the rest of a path is the path from there."""
    layout = tuple(LAYOUTS[name])
    start, goal = find(layout, "R"), find(layout, "G")
    path = shortest_path(layout, start, goal)
    assert len(path) == n_steps + 1 and path[0] == start and path[-1] == goal and len(set(path)) == len(path)
    assert all(abs(a - c) + abs(b - d) == 1 for (a, b), (c, d) in zip(path, path[1:], strict=False)) and all(layout[i][j] != "#" for i, j in path)
    assert all(shortest_path(layout, cell, goal) == path[k:] for k, cell in enumerate(path))


def test_paths_on_known_maps():
    assert shortest_path(("#####", "#R..#", "###.#", "#G..#", "#####"), (1, 1), (3, 1)) == [(1, 1), (1, 2), (1, 3), (2, 3), (3, 3), (3, 2), (3, 1)]
    assert shortest_path(("...", ".#.", "..."), (0, 0), (0, 2)) == [(0, 0), (0, 1), (0, 2)]
    assert shortest_path(("..",), (0, 1), (0, 1)) == [(0, 1)]
    with pytest.raises(ValueError, match=r"there is no way from cell \(0, 0\) to cell \(0, 2\)"):
        shortest_path((".#.",), (0, 0), (0, 2))


def test_waypoints():
    """The centre of the next cell, and the goal itself in the goal's cell."""
    layout, goal = LAYOUTS["umaze"], np.array([0.7, 8.3])
    for xy, target in (((0.2, -0.3), (4, 0)), ((3.0, 1.0), (8, 0)), ((8.0, 0.5), (8, 4)), ((5.0, 8.0), tuple(goal)), ((1.0, 7.0), tuple(goal))):
        expected = target if xy != (5.0, 8.0) else (0, 8)
        np.testing.assert_array_equal(waypoint(layout, np.array(xy), goal), expected)


def test_the_walker_sees_the_same_ant_whichever_way_it_is_turned():
    """An ant turned by any angle, with its legs renamed by any number of quarters, under a heading turned likewise: the same observation, and the same walk."""
    ant, twin, rng = AntMaze("open"), AntMaze("open"), np.random.default_rng(0)
    for heading, turned, quarters in ((0.3, 1.1, 1), (0.3, -2.0, 2), (2.0, 0.4, 3), (-1.0, 3.0, 0)):
        observation, _ = ant.reset(seed=quarters)
        turns = [np.array([math.cos(angle / 2), 0, 0, math.sin(angle / 2)]) for angle in (turned, quarters * math.pi / 2)]
        qpos, qvel, half, quaternion = observation[:15].copy(), observation[15:29].copy(), np.zeros(4), np.zeros(4)
        mujoco.mju_mulQuat(half, turns[0], observation[3:7])
        mujoco.mju_mulQuat(quaternion, half, turns[1])
        qpos[:2], qpos[3:7] = rotation(turned)[:2, :2] @ observation[:2], quaternion
        qvel[:3], qvel[3:6] = rotation(turned) @ observation[15:18], rotation(-quarters * math.pi / 2) @ observation[18:21]
        for vector, first in ((qpos, 7), (qvel, 6)):
            vector[first::2], vector[first + 1 :: 2] = (
                np.roll(vector[first::2], -quarters),
                ANKLE_SIGNS * np.roll(ANKLE_SIGNS * vector[first + 1 :: 2], -quarters),
            )
        twin_observation = twin.set_state(np.concatenate([np.zeros(14), qpos, qvel, [0, 0]]))
        first_legs = set()
        for _ in range(20):
            (walk, leg), (twin_walk, twin_leg) = to_walk_frame(observation, heading), to_walk_frame(twin_observation, heading + turned)
            np.testing.assert_allclose(walk, twin_walk, atol=1e-5)
            assert walk[1] > 0.7 * math.hypot(walk[1], walk[4]) - 1e-6 and walk.dtype == np.float32  # it faces forward, to 45 degrees
            first_legs.add((twin_leg - leg) % 4)
            action = rng.uniform(-1, 1, 8)
            observation, twin_observation = ant.step(from_walk_frame(action, leg))[0], twin.step(from_walk_frame(action, twin_leg))[0]
        assert len(first_legs) == 1


def test_the_walks_reward_is_the_speed_towards_the_heading():
    walk = Walk(dataclasses.replace(ARGS, episode_length=50), 1)
    walk.reset()
    for _ in range(20):
        before = walk.observation.copy()
        _, reward, fell, _ = walk.step(np.full(8, 0.2))
        moved = (walk.observation[:2] - before[:2]) / 0.1
        assert not fell and reward == pytest.approx(moved[0] * math.cos(walk.heading) + moved[1] * math.sin(walk.heading))
    state = walk.ant.get_state()
    state[14 + 3 : 14 + 7] = [0, 1, 0, 0]  # on its back
    walk.observation = walk.ant.set_state(state)
    _, reward, fell, done = walk.step(np.zeros(8))
    assert fell and done and reward < -5


def rows_of(out):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "steps_per_second"} for row in rows]


def test_training_resumes_to_the_same_numbers(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir(), parts.mkdir()
    module.train_walker(ARGS, whole)
    save_atomically, saved = module.save_atomically, []

    def killed(path, content):
        saved.append(path.name)
        if saved == ["walker.pt", "checkpoint.pt", "walker.pt"]:
            raise KeyboardInterrupt
        save_atomically(path, content)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "save_atomically", killed)
        module.train_walker(ARGS, parts)
    assert torch.load(parts / "checkpoint.pt", weights_only=True)["step"] == 40
    module.train_walker(ARGS, parts)
    assert rows_of(whole) == rows_of(parts) and [row["step"] for row in rows_of(whole)] == [40, 80, 120]
    a, b = (torch.load(out / "checkpoint.pt", weights_only=True) for out in (whole, parts))
    assert torch.equal(a["buffer"]["rows"], b["buffer"]["rows"]) and torch.equal(a["rng"], b["rng"])
    assert all(torch.equal(value, b["agent"]["actor"][name]) for name, value in a["agent"]["actor"].items())
    fresh = module.Actor(module.WALK_DIM, Walk(ARGS, 0).action_space, gsde=False).state_dict()
    assert set(fresh) == set(torch.load(whole / "walker.pt", weights_only=True)["actor"])


def test_point_demonstrations(tmp_path):
    """Recorded twice: the same file; all successes; D4RL's arrays; every step replays to the bit; the notes hold the rate."""
    args = Args(env_id=POINT, n_demos=2)
    files = []
    for name in "ab":
        out = tmp_path / name
        out.mkdir()
        module.record_demonstrations(args, out)
        with h5py.File(out / f"{POINT}.hdf5", "r") as file:
            files.append(
                {key: file[key][()] for key in ("observations", "actions", "rewards", "terminals", "timeouts", "infos/goal", "infos/qpos", "infos/qvel")}
            )
            assert file.attrs["env_id"] == POINT and "NOT D4RL's data" in file.attrs["made_by"] and "scripted controller" in file.attrs["made_by"]
    for key, value in files[0].items():
        np.testing.assert_array_equal(value, files[1][key], err_msg=key)
    ends = np.flatnonzero(files[0]["terminals"])
    assert len(ends) == 2 and ends[1] == len(files[0]["actions"]) - 1 and not files[0]["timeouts"].any()
    assert (np.flatnonzero(files[0]["rewards"]) == ends).all() and np.abs(files[0]["actions"]).max() <= 1
    assert {key: (value.dtype, value.shape[1:]) for key, value in files[0].items()} == {
        "observations": (np.float32, (4,)),
        "actions": (np.float32, (2,)),
        "rewards": (np.float32, ()),
        "terminals": (bool, ()),
        "timeouts": (bool, ()),
        "infos/goal": (np.float32, (2,)),
        "infos/qpos": (np.float32, (2,)),
        "infos/qvel": (np.float32, (2,)),
    }
    env = make_env(POINT, horizon=700)
    demos = load(tmp_path / "a" / f"{POINT}.hdf5", env)
    assert demos.terminated.sum() == demos.n_episodes == 2 and check_replay(demos, env, np.arange(len(demos.rewards)), "a")[0] == 0
    notes = json.loads((tmp_path / "a" / f"{POINT}.json").read_text())
    assert notes["returns"]["0"]["mean"] == 2 / notes["returns"]["0"]["episodes"] and notes["walker_steps"] == 0


def test_recording_killed_before_its_end_starts_again(tmp_path, monkeypatch):
    """The demonstrations appear as the last, whole and checked, so that they are never without their notes."""
    args = Args(env_id=POINT, n_demos=1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "write_atomically", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        module.record_demonstrations(args, tmp_path)
    assert not (tmp_path / f"{POINT}.hdf5").exists()
    module.record_demonstrations(args, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{POINT}.hdf5", f"{POINT}.json"]


def test_an_evaluation_before_the_first_update(tmp_path):
    module.train_walker(dataclasses.replace(ARGS, total_timesteps=40, eval_every=20, learning_starts=30), tmp_path)
    first, last = rows_of(tmp_path)
    assert "critic_loss" not in first and "critic_loss" in last


def test_only_successes_are_kept_and_a_hopeless_expert_is_refused():
    """A controller that stands still in every other episode: as many failures as successes, none of them in the arrays."""
    env, n_started = make_env(POINT, horizon=400, seed=1), 0

    def every_other(observation, target):
        nonlocal n_started
        n_started += env.t == 0
        return push(observation, target) if n_started % 2 == 0 else np.zeros(2)

    arrays, n_episodes = record(env, every_other, dataclasses.replace(ARGS, n_demos=2, noise=0.0))
    assert n_episodes == 4 and arrays["terminals"].sum() == 2 and np.abs(arrays["observations"][:, 2:]).max() > 1
    with pytest.raises(SystemExit, match="only 0 of 10 episodes reached the goal within 700 steps: train longer, or give less --noise"):
        record(make_env(POINT, horizon=5), push, dataclasses.replace(ARGS, n_demos=1))


def test_refusals(tmp_path, monkeypatch):
    for args, message in (
        (Args(env_id="Hopper-v5", out=str(tmp_path)), "--env-id Hopper-v5 is no maze: give one of antmaze-umaze-v2, "),
        (Args(env_id="antmaze-large-v2", out=str(tmp_path)), "--env-id antmaze-large-v2 is no maze"),
        (Args(n_demos=0, out=str(tmp_path)), "--n-demos is 0: give at least 1"),
        (Args(seed=-1, out=str(tmp_path)), "--seed is -1: give at least 0"),
        (Args(horizon=0, out=str(tmp_path)), "--horizon is 0: give at least 1"),
        (Args(eval_every=0, out=str(tmp_path)), "--eval-every is 0: give at least 1"),
        (Args(out=str(tmp_path), record=True), "holds no walker.pt yet: leave out --record"),
    ):
        monkeypatch.setattr(module.tyro, "cli", lambda cls, args=args: args)
        with pytest.raises(SystemExit, match=message):
            module.main()
        assert not (tmp_path / "args.json").exists()  # which would hold the corrected command to the fault
    (tmp_path / "args.json").write_text(json.dumps(dataclasses.asdict(Args(gamma=0.5, noise=0.1))))
    with pytest.raises(SystemExit, match="was started with another gamma: give the same"):
        module.main()
