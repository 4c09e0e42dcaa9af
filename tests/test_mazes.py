"""AntMaze and PointMaze: D4RL's mazes, goals, rewards and physics by value, and restores to the bit."""

import importlib.util
import math
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from utils.envs import MAZE_ENVS, get_state, make_env, set_state

mujoco = pytest.importorskip("mujoco", reason='needs pip install "mujoco>=3.1.6,<4" imageio')
from utils.mazes import CELL, LAYOUTS, AntMaze, cell_centre, cell_of, find

ROOT = Path(__file__).resolve().parents[1]
ANT, POINT = "antmaze-large-play-v2", "PointMaze_Large-v0"
# D4RL's HARDEST_MAZE_TEST, as its package writes it.
D4RL_LARGE = """
    1 1 1 1 1 1 1 1 1 1 1 1
    1 R 0 0 0 1 0 0 0 0 0 1
    1 0 1 1 0 1 0 1 0 1 0 1
    1 0 0 0 0 0 0 1 0 0 0 1
    1 0 1 1 1 1 0 1 1 1 0 1
    1 0 0 1 0 1 0 0 0 0 0 1
    1 1 0 1 0 1 0 1 0 1 1 1
    1 0 0 1 0 0 0 1 0 G 0 1
    1 1 1 1 1 1 1 1 1 1 1 1"""


def play(env, n_steps, seed=0):
    """Random actions, with resets: (observation, state, action, results, next state) of each step."""
    rng, rows = np.random.default_rng(seed), []
    env.reset()
    for _ in range(n_steps):
        before, state, action = env.observation.copy(), get_state(env), env.random_action(rng)
        result = env.step(action)[:4]
        rows.append((before, state, action, result, get_state(env)))
        if result[2] or result[3]:
            env.reset()
    return rows


# ------------------------------------------------------------------------------------------------------------------------------------ restores


@pytest.mark.parametrize("env_id", MAZE_ENVS)
def test_restore_is_exact(env_id):
    """Any state, in any order, in another instance with another history and another goal: everything that follows, to the bit."""
    rows = play(make_env(env_id, seed=1, horizon=60), 150)
    other = make_env(env_id, seed=2)
    other.horizon = 60
    play(other, 20, seed=9)
    assert len({tuple(row[1][-2:]) for row in rows}) == 3  # goals
    for k in np.random.default_rng(3).permutation(len(rows)):
        before, state, action, result, after = rows[k]
        np.testing.assert_array_equal(set_state(other, state), before)
        np.testing.assert_array_equal(get_state(other), state)
        np.testing.assert_array_equal(other.unwrapped.goal, state[-2:])
        observation, *rest = other.step(action)[:4]
        np.testing.assert_array_equal(observation, result[0])
        assert rest == list(result[1:])
        np.testing.assert_array_equal(get_state(other), after)


def test_restore_holds_for_a_stretch_against_a_wall():
    """200 steps from one restore, thrown at a wall, while other instances step."""
    env, replay, bystander = make_env(ANT, seed=1), make_env(ANT, seed=2), make_env(ANT, seed=3)
    env.reset()
    state = get_state(env)
    state[1:][14 + 1], state[1:][14 + 15 + 1] = -1.0, -3.0  # y and its speed: thrown at the lower wall
    set_state(env, state)
    rng, contacts, rows = np.random.default_rng(0), 0, []
    for _ in range(200):
        rows.append((get_state(env), env.random_action(rng)))
        rows[-1] += (env.step(rows[-1][1])[0],)
        walls = [mujoco.mj_id2name(env.unwrapped.model, mujoco.mjtObj.mjOBJ_GEOM, g) for c in env.unwrapped.data.contact for g in (c.geom1, c.geom2)]
        contacts += any((name or "").startswith("block") for name in walls)
    assert contacts >= 5
    set_state(replay, rows[1][0])
    for _, action, observation in rows[1:]:
        play(bystander, 1)
        np.testing.assert_array_equal(replay.step(action)[0], observation)


def test_a_state_without_the_solvers_warm_start_is_close():
    """What D4RL's files keep, positions and velocities in single precision, gives the next observation to 2e-6 (measured), not to the bit."""
    rows = play(make_env(ANT, seed=1), 300)
    env, errors = make_env(ANT), []
    for _, state, action, result, _ in rows:
        rounded = state.astype(np.float32).astype(np.float64)
        rounded[1:15] = 0
        set_state(env, rounded)
        errors.append(np.abs(env.step(action)[0] - result[0]).max())
    assert 0 < np.median(errors) < 1e-5 and max(errors) < 1e-3


def test_a_reset_after_a_restore_is_like_a_new_environment():
    for env_id in (ANT, POINT):
        env, new = make_env(env_id, seed=1), make_env(env_id, seed=2)
        set_state(env, play(env, 30)[-1][1])
        play(env, 10)
        np.testing.assert_array_equal(env.reset(seed=3)[0], new.reset(seed=3)[0])
        rng = np.random.default_rng(0)
        for _ in range(20):
            action = env.random_action(rng)
            np.testing.assert_array_equal(env.step(action)[0], new.step(action)[0])


# ------------------------------------------------------------------------------------------------------- layout, observation, reward and goals


def test_layouts_are_d4rls():
    rows = [row.split() for row in D4RL_LARGE.split("\n") if row]
    assert LAYOUTS["large"] == ["".join(row).replace("1", "#").replace("0", ".") for row in rows]
    shapes = {name: (len(layout), {len(row) for row in layout}) for name, layout in LAYOUTS.items()}
    assert shapes == {"umaze": (5, {5}), "medium": (8, {8}), "large": (9, {12}), "open": (1, {1})}
    for name, cell, goal in (("umaze", (3, 1), (0, 8)), ("medium", (6, 6), (20, 20)), ("large", (7, 9), (32, 24))):
        assert find(LAYOUTS[name], "R") == (1, 1) and find(LAYOUTS[name], "G") == cell
        np.testing.assert_array_equal(cell_centre(cell), goal)
    np.testing.assert_array_equal(cell_centre((1, 1)), (0, 0))
    for xy, cell in (((0, 0), (1, 1)), ((1.9, -1.9), (1, 1)), ((2.1, 0), (1, 2)), ((0, 2.1), (2, 1)), ((33.5, 25.5), (7, 9)), ((-2.1, 0), (1, 0))):
        assert cell_of(xy) == cell


@pytest.mark.parametrize("env_id, horizon", [(ANT, 1000), ("antmaze-umaze-v2", 700), ("antmaze-medium-diverse-v2", 1000), (POINT, 1000)])
def test_horizon(env_id, horizon):
    assert make_env(env_id).horizon == horizon
    env = make_env(env_id, horizon=700)
    env.reset()
    state = get_state(env)
    state[0] = 698
    set_state(env, state)
    zero = np.zeros(env.action_space.shape)
    assert [env.step(zero)[1:4] for _ in range(2)] == [(0.0, False, False), (0.0, False, True)]


@pytest.mark.parametrize("env_id, nq, nv, k", [(ANT, 15, 14, 8), (POINT, 2, 2, 2)])
def test_observation_layout(env_id, nq, nv, k):
    """Positions, velocities, goal, in float32; actions in [-1, 1]; a step lasts 0.1 s."""
    env = make_env(env_id, seed=1)
    observation, _ = env.reset()
    for _ in range(5):
        data, maze = env.unwrapped.data, env.unwrapped
        assert observation.shape == env.observation_space.shape == (nq + nv + 2,) and observation.dtype == np.float32
        np.testing.assert_array_equal(observation, np.concatenate([data.qpos, data.qvel, maze.goal]).astype(np.float32))
        assert env.state_size == 1 + nv + nq + nv + 2
        before = data.time
        observation, *_ = env.step(np.full(k, 0.3))
        assert data.time - before == pytest.approx(0.1)
    assert env.action_space.shape == (k,) and (env.action_space.low == -1).all() and (env.action_space.high == 1).all()


@pytest.mark.parametrize("env_id", [ANT, POINT])
def test_start_states_and_goals(env_id):
    """Starts: the model's own, +- 0.1, speeds of standard deviation 0.1. Goals: (32, 24) + U(0, 1) + U(0, 0.5) on each axis, anew for each episode."""
    env = make_env(env_id, seed=1)
    nq, nv, n = env.unwrapped.model.nq, env.unwrapped.model.nv, 2000
    observations = np.array([env.reset()[0] for _ in range(n)], dtype=np.float64)
    goals, speeds, positions = observations[:, -2:] - [32, 24], observations[:, nq : nq + nv], observations[:, :nq] - env.unwrapped.init_qpos
    assert goals.min() >= 0 and goals.max() <= 1.5 and len(np.unique(goals[:, 0])) > 0.99 * n
    np.testing.assert_allclose(goals.mean(0), 0.75, atol=0.03)
    np.testing.assert_allclose(goals.var(0), (1 + 0.25) / 12, atol=0.01)
    np.testing.assert_allclose([(goals < x).mean() for x in (0.25, 0.5, 1.0)], [0.0625, 0.25, 0.75], atol=0.03)  # of the sum of two uniforms
    assert abs(np.corrcoef(goals.T)[0, 1]) < 0.07
    np.testing.assert_allclose(speeds.std(0), 0.1, atol=0.01)
    np.testing.assert_allclose(speeds.mean(0), 0, atol=0.01)
    free = [i for i in range(nq) if nq == 2 or not 3 <= i < 7]  # the quaternion is normalised
    assert np.abs(positions[:, free]).max() <= 0.1001
    np.testing.assert_allclose(positions[:, free].std(0), 0.2 / math.sqrt(12), atol=0.004)
    if nq == 15:
        np.testing.assert_allclose(np.linalg.norm(observations[:, 3:7], axis=1), 1, atol=1e-6)
    assert (np.linalg.norm(observations[:, :2] - observations[:, -2:], axis=1) > 30).all()  # nobody starts at the goal


def test_the_same_seed_gives_the_same_goals():
    env, same, other = make_env(ANT, seed=4), make_env(ANT, seed=4), make_env(ANT, seed=5)
    goals = [[tuple(e.reset()[0][-2:]) for _ in range(3)] for e in (env, same, other)]
    assert goals[0] == goals[1] and goals[0] != goals[2] and len(set(goals[0])) == 3


@pytest.mark.parametrize("env_id", [ANT, POINT])
def test_reward_and_ending(env_id):
    """Reward 1 and the end exactly where the robot is within 0.5 m of the goal after the step; else 0 and no end."""
    env = make_env(env_id, seed=1)
    env.reset()
    n_warm, nq = env.unwrapped.model.nv, env.unwrapped.model.nq
    state, zero, seen = get_state(env), np.zeros(env.action_space.shape), set()
    state[1:][n_warm + nq : -2] = 0  # no velocity
    for distance in (0.0, 0.3, 0.45, 0.499, 0.501, 0.55, 1.0, 4.0):
        for angle in np.linspace(0, 2 * math.pi, 5):
            state[-2:] = state[1:][n_warm : n_warm + 2] + distance * np.array([math.cos(angle), math.sin(angle)])
            set_state(env, state)
            observation, reward, terminated, truncated, info = env.step(zero)
            near = np.linalg.norm(env.unwrapped.data.qpos[:2] - state[-2:]) <= 0.5
            assert (reward, terminated, truncated, info["success"]) == (float(near), near, False, near)
            seen.add((distance, bool(near)))
    assert {(0.45, True), (0.55, False), (4.0, False)} <= seen


def test_an_ant_on_its_back_goes_on():
    env = make_env(ANT, seed=1)
    env.reset()
    state = get_state(env)
    state[1:][14 + 2 : 14 + 7] = [0.5, 0, 1, 0, 0]
    set_state(env, state)
    assert all(env.step(np.zeros(8))[1:4] == (0.0, False, False) for _ in range(50))


def test_walls_stop_the_ball():
    """Pushed in each direction from the start, the ball stays in the free cells; along the free ones it comes far."""
    env, layout = make_env(POINT, seed=1), LAYOUTS["large"]
    for push, far in (((1, 0), True), ((0, 1), True), ((-1, 0), False), ((0, -1), False), ((-1, -1), False)):
        env.reset(seed=0)
        for _ in range(80):
            x, y, *_ = env.step(np.array(push, dtype=np.float32))[0]
            row, column = cell_of((x, y))
            assert layout[row][column] != "#"
        assert (max(abs(x), abs(y)) > 3 * CELL - 1) == far


# ------------------------------------------------------------------------------------------------------------------------ D4RL's own simulation


def d4rl_model():
    """D4RL's ant.xml, with the walls as its maze_env.py adds them, from an installed `d4rl` package that is never imported."""
    spec = importlib.util.find_spec("d4rl")
    if spec is None:
        pytest.skip("D4RL's ant.xml is not here: pip install --no-deps d4rl")
    tree = ET.parse(Path(spec.submodule_search_locations[0]) / "locomotion" / "assets" / "ant.xml")
    world, scaling, height = tree.find(".//worldbody"), 4.0, 0.5
    for i, row in enumerate(row.split() for row in D4RL_LARGE.split("\n") if row):
        for j, mark in enumerate(row):
            if mark == "1":
                wall = {"name": f"block_{i}_{j}", "type": "box", "material": "", "contype": "1", "conaffinity": "1", "rgba": "0.7 0.5 0.3 1.0"}
                wall["pos"] = f"{j * scaling - scaling:f} {i * scaling - scaling:f} {height / 2 * scaling:f}"
                wall["size"] = f"{0.5 * scaling:f} {0.5 * scaling:f} {height / 2 * scaling:f}"
                ET.SubElement(world, "geom", wall)
    model = mujoco.MjModel.from_xml_string(ET.tostring(tree.getroot(), encoding="unicode"))
    if tuple(map(int, mujoco.__version__.split(".")[:2])) >= (3, 5):
        model.geom_margin /= 2  # contacts begin at the sum of both margins there, and at the greater one in D4RL's MuJoCo
    return model


def test_model_is_d4rls():
    theirs, ours = d4rl_model(), make_env(ANT).unwrapped.model
    fields = [name for name in dir(theirs) if name.startswith(("body_", "geom_", "jnt_", "dof_")) and isinstance(getattr(theirs, name), np.ndarray)]
    skipped = {"geom_matid", "geom_rgba", "geom_group"}  # looks
    assert len(fields) > 60
    for name in sorted({*fields, "qpos0"} - skipped):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
    for name in ("timestep", "integrator", "solver", "iterations", "tolerance", "cone", "jacobian", "impratio", "gravity", "disableflags", "enableflags"):
        np.testing.assert_array_equal(getattr(ours.opt, name), getattr(theirs.opt, name), err_msg=name)
    assert ours.opt.timestep == 0.02 and make_env(ANT).unwrapped.frame_skip == 5
    np.testing.assert_array_equal(ours.actuator_trnid, theirs.actuator_trnid)
    torques = [model.actuator_gear[:, :1] * model.actuator_ctrlrange for model in (ours, theirs)]
    np.testing.assert_array_equal(*torques)
    assert (torques[0] == [-30, 30]).all() and (ours.actuator_ctrlrange == [-1, 1]).all()


@pytest.mark.parametrize("seed", range(3))
def test_physics_is_d4rls(seed):
    """200 steps of random actions from the same start: positions and velocities within 1e-10."""
    model, env, rng = d4rl_model(), make_env(ANT, seed=seed), np.random.default_rng(seed)
    data = mujoco.MjData(model)
    env.reset()
    data.qpos[:], data.qvel[:] = env.unwrapped.data.qpos, env.unwrapped.data.qvel
    for t in range(200):
        action = env.random_action(rng)
        env.step(action)
        data.ctrl[:] = 30 * action.astype(np.float64)
        for _ in range(5):
            mujoco.mj_step(model, data)
        for name in ("qpos", "qvel"):
            np.testing.assert_allclose(getattr(env.unwrapped.data, name), getattr(data, name), rtol=0, atol=1e-10, err_msg=f"step {t}")


# ---------------------------------------------------------------------------------------------------------------------- drawing, missing packages

DRAW = """
import sys
sys.path.insert(0, {root!r})
from utils.envs import make_env
env = make_env({env_id!r}, render_mode="rgb_array")
env.reset()
try:
    image = env.render()
    print("drawn", image.shape, image.dtype, len(set(map(tuple, image[::20, ::20].reshape(-1, 3).tolist()))) > 3)
except RuntimeError as error:
    print("refused", str(error))
sys.stdout.flush()
import os
os._exit(0)  # what is left of a failed OpenGL platform complains when it is taken down
"""


DRAW_PLAINLY = """
import gymnasium
env = gymnasium.make("Ant-v5", render_mode="rgb_array")
env.reset()
print(env.render().shape)
"""


@pytest.mark.parametrize("env_id", [ANT, POINT])
def test_draws_or_says_why_not(env_id):
    """It may refuse only where gymnasium can't draw its own ant."""
    run, plain = (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
        for program in (DRAW.format(root=str(ROOT), env_id=env_id), DRAW_PLAINLY)
    )
    last = run.stdout.strip().splitlines()[-1]
    if plain.stdout.strip() == "(480, 480, 3)":
        assert last == "drawn (480, 480, 3) uint8 True", run
    else:
        assert last.startswith("refused the maze cannot be drawn here") and "MUJOCO_GL=" in last, (run, plain)


MISSING = """
import sys
sys.path.insert(0, {root!r})
sys.modules["mujoco"] = sys.modules["h5py"] = None
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "mujoco" else find_spec(name, *rest)
import utils.demos
from utils.envs import make_env
make_env("HopperBulletEnv-v0").reset()
make_env("CartPole-v1").reset()
for env_id in ("antmaze-large-play-v2", "PointMaze_Large-v0"):
    try:
        make_env(env_id)
    except ValueError as error:
        print(error)
"""


def test_without_mujoco_bullet_runs_and_mazes_say_what_to_install():
    run = subprocess.run([sys.executable, "-c", MISSING.format(root=str(ROOT))], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    needs = 'needs a package that is not installed: pip install "mujoco>=3.1.6,<4" imageio'
    assert run.stdout.strip().splitlines() == [f"{ANT} {needs}", f"{POINT} {needs}"]


def test_unknown_maze_is_refused_by_name():
    with pytest.raises(ValueError, match="unknown environment 'antmaze-huge-play-v2': known ids are .*antmaze-large-play-v2, .*PointMaze_Large-v0"):
        make_env("antmaze-huge-play-v2")
    assert AntMaze("open").layout == ["R"]
