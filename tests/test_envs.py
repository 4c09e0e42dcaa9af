"""Environments and exact resets: every claim of utils/envs.py, by value."""

import json
import os
import resource
import subprocess
import sys
import time

import gymnasium as gym
import numpy as np
import pytest

from utils.envs import BULLET_ENVS, CLASSIC_ENVS, MAZE_ENVS, MUJOCO_ENVS, SMALL_MDPS, MujocoState, evaluate, get_state, make_env, set_state

HOPPER = "HopperBulletEnv-v0"
ALL_ENVS = BULLET_ENVS + MUJOCO_ENVS + CLASSIC_ENVS + SMALL_MDPS


def make(env_id, **kwargs):
    if env_id in MUJOCO_ENVS:
        pytest.importorskip("mujoco")
    if env_id in BULLET_ENVS:
        pytest.importorskip("pybullet_envs_gymnasium")
    return make_env(env_id, **kwargs)


def play(env, n_steps, seed=0, actions=None):
    """n_steps of random (or the given) actions, with resets. One row a step: observation and state before, executed action, result, state after."""
    rng = np.random.default_rng(seed)
    if env.observation is None:
        env.reset()
    rows = []
    for i in range(n_steps):
        before, state = env.observation.copy(), get_state(env)
        action = env.random_action(rng) if actions is None else actions[i]
        observation, reward, terminated, truncated, info = env.step(action)
        rows.append((before, state, info["executed_action"], (observation, reward, terminated, truncated), get_state(env)))
        if (terminated or truncated) and actions is None:
            env.reset()
    return rows


def same(a, b):
    """Equal to the bit: observation, reward, terminated, truncated."""
    return np.array_equal(a[0], b[0]) and list(a[1:]) == list(b[1:])


# ---------------------------------------------------------------------------------------------------------------------------- exact restores


@pytest.mark.parametrize("env_id", ALL_ENVS)
def test_restore_is_exact(env_id):
    """Any state, in any order, in another instance with another history: observation, next observation, reward, both endings and next state."""
    rows = play(make(env_id, seed=1, horizon=150), 300)
    other = make(env_id, seed=2, horizon=150)
    play(other, 20, seed=9)
    if env_id in BULLET_ENVS:
        other.unwrapped.robot.initial_z = 9.0
    for k in np.random.default_rng(3).permutation(len(rows)):
        before, state, action, result, after = rows[k]
        np.testing.assert_array_equal(set_state(other, state), before)
        np.testing.assert_array_equal(get_state(other), state)
        np.testing.assert_array_equal(other.observation, before)
        assert same(other.step(action)[:4], result), k
        np.testing.assert_array_equal(get_state(other), after)


@pytest.mark.parametrize("env_id", [HOPPER, "HumanoidBulletEnv-v0", "Ant-v5", "MountainCarContinuous-v0"])
def test_replay_with_another_environment_alive(env_id):
    """A whole stretch from one restore, step by step, while another instance is stepped in between. In a new instance that was never reset."""
    env = make(env_id, seed=1, horizon=100)
    env.reset()
    rows = play(env, 60, actions=[env.random_action(np.random.default_rng(i)) for i in range(60)])
    other, replay = make(env_id, seed=5), make(env_id, seed=6, horizon=100)
    other.reset()
    set_state(replay, rows[10][1])
    for k in range(10, 60):
        play(other, 1, seed=k)
        assert same(replay.step(rows[k][2])[:4], rows[k][3]), k


def test_mujoco_derived_quantities_are_refreshed():
    """What a renderer reads after a restore belongs to the restored positions."""
    mujoco = pytest.importorskip("mujoco")
    env, other = make("Ant-v5", seed=1), make("Ant-v5", seed=2)
    state = play(env, 40)[-1][1]
    set_state(other, state)
    model, data = other.unwrapped.model, mujoco.MjData(other.unwrapped.model)
    data.qpos[:] = other.unwrapped.data.qpos
    mujoco.mj_kinematics(model, data)
    np.testing.assert_array_equal(other.unwrapped.data.geom_xpos, data.geom_xpos)


def test_restore_after_a_limb_tangle():
    """Humanoid's limbs collide with each other, and such contacts survive being lifted off the ground."""
    env, other = make("HumanoidBulletEnv-v0", seed=1), make("HumanoidBulletEnv-v0", seed=2)
    bullet, rng = env.unwrapped._p, np.random.default_rng(0)
    (body,) = env.unwrapped.robot.objects
    rows, n_self_contacts = [], 0
    for _ in range(6):
        env.reset()
        for joint in range(bullet.getNumJoints(body)):
            low, high = bullet.getJointInfo(body, joint)[8:10]
            if low < high:
                bullet.resetJointState(body, joint, rng.uniform(low, high), rng.normal())
        action = env.random_action(rng)
        for _ in range(50):
            rows += play(env, 1, actions=[np.clip(action + env.random_action(rng) / 2, -1, 1)])
            n_self_contacts += len(bullet.getContactPoints(body, body)) > 0
    assert n_self_contacts > 60
    for k in rng.permutation(len(rows)):
        set_state(other, rows[k][1])
        assert same(other.step(rows[k][2])[:4], rows[k][3]), k


def test_reset_after_a_restore_is_like_a_new_environment():
    for env_id in (HOPPER, "HumanoidBulletEnv-v0", "Ant-v5", "Acrobot-v1"):
        env, new = make(env_id, seed=1, horizon=300), make(env_id, seed=2, horizon=300)
        rows = play(env, 30)
        set_state(env, rows[-1][1])
        play(env, 100)
        actions = [env.random_action(np.random.default_rng(i)) for i in range(50)]
        results = []
        for e in (env, new):
            first, info = e.reset(seed=3)
            assert info["seed"] == 3
            results.append((first, play(e, 50, actions=actions)))
        np.testing.assert_array_equal(results[0][0], results[1][0])
        assert all(same(a[3], b[3]) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_joints_do_not_spring_back():
    """Motors must not pull after a restore: a step after 50 steps of full torque equals the same step in an environment that never moved."""
    env, new = make("HalfCheetahBulletEnv-v0", seed=1), make("HalfCheetahBulletEnv-v0", seed=2)
    env.reset()
    standing = get_state(env)
    for _ in range(50):
        env.step(np.ones(6, dtype=np.float32))
    set_state(env, standing)
    restored = [env.step(np.zeros(6, dtype=np.float32)) for _ in range(3)]
    set_state(new, standing)
    for step in restored:
        assert same(new.step(np.zeros(6, dtype=np.float32))[:4], step[:4])
    assert np.abs(get_state(env) - standing)[1:].max() > 1e-3  # the free dynamics do move it


def test_saved_states_and_observations_are_copies():
    env = make("HalfCheetahBulletEnv-v0", seed=1)
    observation, _ = env.reset()
    first = observation.copy()
    state = get_state(env)
    saved = state.copy()
    observation += 1.0  # such as an in-place normaliser's
    np.testing.assert_array_equal(get_state(env), saved)
    stepped = env.step(np.zeros(6))[0]
    after = get_state(env)
    stepped += 1.0
    np.testing.assert_array_equal(get_state(env), after)
    np.testing.assert_array_equal(state, saved)
    set_state(env, state)[:] = 7.0
    np.testing.assert_array_equal(set_state(env, get_state(env)), first)


@pytest.mark.parametrize("env_id", [HOPPER, "HalfCheetahBulletEnv-v0", "HumanoidBulletEnv-v0", "Ant-v5", "CartPole-v1"])
def test_restore_is_fast_and_leaks_nothing(env_id):
    env = make(env_id, seed=1)
    states = [row[1] for row in play(env, 20)]

    def restore(n):
        durations = []
        for i in range(n):
            start = time.perf_counter()
            set_state(env, states[i % len(states)])
            durations.append(time.perf_counter() - start)
        return np.median(durations)

    restore(1000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert restore(20_000 if env_id == HOPPER else 4000) < 1e-3  # measured: 10 to 200 microseconds
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB on Linux, bytes on macOS
    assert grown < 2048 * (1024 if sys.platform == "darwin" else 1)


# ------------------------------------------------------------------------------------------------------------------------- horizon and endings


def test_horizon_after_a_restore():
    env = make("HalfCheetahBulletEnv-v0", seed=1)
    assert env.horizon == 1000
    state = get_state(env)
    state[0] = 990
    set_state(env, state)
    endings = [env.step(np.zeros(6))[2:4] for _ in range(10)]
    assert endings == [(False, False)] * 9 + [(False, True)]


def test_many_restores_never_truncate():
    env = make("Pendulum-v1", seed=1)
    env.reset()
    early, late = get_state(env), get_state(env)
    late[0] = 198  # of 200
    for i in range(500):
        set_state(env, late if i % 2 else early)
        _, _, terminated, truncated, _ = env.step(np.zeros(1))
        assert not terminated and not truncated, i
    assert env.reset() and env.t == 0


@pytest.mark.filterwarnings("ignore:.*You are calling 'step")
def test_termination_is_not_truncation():
    """CartPole falls after some ten steps to one side; with a horizon of 5 it is truncated, not terminated."""
    env = make("CartPole-v1", seed=1)
    env.reset()
    endings = [env.step(1)[2:4] for _ in range(5)]
    assert endings == [(False, False)] * 5
    while not endings[-1][0]:
        endings.append(env.step(1)[2:4])
    assert len(endings) < 15 and endings[-1] == (True, False)
    # A pole that has fallen earns nothing more, after a restore neither.
    fallen, other = get_state(env), make("CartPole-v1", seed=2)
    for _ in range(2):
        set_state(other, fallen)
        assert other.step(1)[1:4] == (0.0, True, False)
    short = make("CartPole-v1", seed=1, horizon=5)
    short.reset()
    assert [short.step(1)[2:4] for _ in range(5)] == [(False, False)] * 4 + [(False, True)]


@pytest.mark.parametrize("env_id", [HOPPER, "Hopper-v5", "CartPole-v1"])
def test_gymnasium_time_limit_is_gone(env_id):
    env, names = make(env_id), []
    while isinstance(env, gym.Wrapper):
        names.append(type(env).__name__)
        env = env.env
    assert len(names) == 2 and names[0] == "ResettableEnv" and names[1].endswith("State")


# ---------------------------------------------------------------------------------------------------------------------- trembling and streams


def tremble_pattern(env, n_steps, action):
    """Which of n_steps executed another action."""
    pattern = []
    for _ in range(n_steps):
        _, _, terminated, truncated, info = env.step(action)
        pattern.append(not np.array_equal(info["executed_action"], action))
        if terminated or truncated:
            env.reset()
    return pattern


def test_tremble_frequency_and_report():
    action = np.array([0.25], dtype=np.float32)
    env = make("Pendulum-v1", seed=1, p_tremble=0.3)
    env.reset()
    frequency = np.mean(tremble_pattern(env, 3000, action))
    assert abs(frequency - 0.3) < 4 * np.sqrt(0.3 * 0.7 / 3000)
    for p, expected in ((0.0, 0), (1.0, 500)):
        env = make("Pendulum-v1", seed=1, p_tremble=p)
        env.reset()
        assert sum(tremble_pattern(env, 500, action)) == expected


def test_executed_action_is_the_one_that_was_executed():
    """An environment without trembling, given the executed actions, goes the same way."""
    for env_id in (HOPPER, "Hopper-v5", "CartPole-v1"):
        trembling, steady = make(env_id, seed=1, p_tremble=0.5), make(env_id, seed=2)
        rng = np.random.default_rng(0)
        trembling.reset(seed=7)
        steady.reset(seed=7)
        changed = 0
        for _ in range(8):
            action = trembling.random_action(rng)
            *result, info = trembling.step(action)
            changed += not np.array_equal(action, info["executed_action"])
            assert same(steady.step(info["executed_action"])[:4], result)
        assert 0 < changed < 8


def test_trembling_has_a_stream_of_its_own():
    action = np.zeros(1, dtype=np.float32)
    env, other = (make("Pendulum-v1", seed=1, p_tremble=0.3, horizon=10_000) for _ in range(2))
    env.reset()
    other.reset()
    saved = get_state(other)
    pattern, disturbed = tremble_pattern(env, 200, action), []
    for i in range(200):
        if i % 3 == 0:
            other.reset()  # moves the start states' stream
        if i % 7 == 0:
            other.reset(seed=i)
            set_state(other, saved)
        disturbed += tremble_pattern(other, 1, action)
    assert disturbed == pattern and 30 < sum(pattern) < 90
    # And the other way round: trembling and explicit seeds don't move the start states.
    still, seeded = make("Pendulum-v1", seed=1), make("Pendulum-v1", seed=1)
    still.reset()
    seeded.reset()
    seeded.reset(seed=123)
    seeds = [[e.reset()[1]["seed"] for _ in range(4)] for e in (env, still, seeded)]
    assert seeds[0] == seeds[1] == seeds[2]


@pytest.mark.parametrize("env_id", [HOPPER, "Ant-v5", "Pendulum-v1"])
def test_same_seed_same_everything(env_id):
    def run(seed):
        env = make(env_id, seed=seed, p_tremble=0.3)
        starts = [env.reset()]
        rows = play(env, 40)
        starts += [env.reset() for _ in range(3)]
        return np.array([s[0] for s in starts]), [s[1]["seed"] for s in starts], np.array([row[2] for row in rows]), [row[3][1] for row in rows]

    first, again, other = run(1), run(1), run(2)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    assert len(set(first[1])) == 4 and len(np.unique(first[0], axis=0)) == 4  # the start states differ from each other


def test_state_and_generators_round_trip():
    """Through a checkpoint: the same future, start states and trembling included, also in another environment."""
    env, other = make(HOPPER, seed=1, p_tremble=0.4), make(HOPPER, seed=2, p_tremble=0.4)
    play(env, 25)
    saved, observation = json.loads(json.dumps(env.state_dict())), env.observation  # plain Python values
    expected = play(env, 60)
    for e in (env, other):
        e.load_state_dict(saved)
        np.testing.assert_array_equal(e.observation, observation)
        assert all(same(a[3], b[3]) for a, b in zip(play(e, 60), expected, strict=True))


# ------------------------------------------------------------------------------------------------------------- still the benchmark's tasks


@pytest.mark.parametrize("env_id", ALL_ENVS)
def test_types_and_own_start_states(env_id):
    """Start states are those of gym.make() to the bit; observations float32 everywhere; the state float64 and finite."""
    env, stock = make(env_id, seed=1), gym.make(env_id, disable_env_checker=True)
    stock.reset(seed=0)  # Bullet's first reset of all differs in the last digits
    for _ in range(3):
        observation, info = env.reset()
        expected, _ = stock.reset(seed=info["seed"])
        np.testing.assert_array_equal(observation, expected.astype(np.float32))
    stepped = env.step(env.random_action(np.random.default_rng(0)))
    state = get_state(env)
    restored = set_state(env, state)
    assert observation.dtype == stepped[0].dtype == restored.dtype == env.observation.dtype == env.observation_space.dtype == np.float32
    assert env.observation_space.shape == observation.shape == restored.shape
    assert state.dtype == np.float64 and state.shape == (env.state_size,) and np.isfinite(state).all() and state[0] == 1
    assert [type(x) for x in stepped[1:4]] == [float, bool, bool]
    spec = gym.spec(env_id)
    assert env.horizon == (spec.max_episode_steps or spec.kwargs["T"])


@pytest.mark.parametrize("env_id", BULLET_ENVS)
def test_bullet_differs_from_stock_only_by_the_contact_cache(env_id):
    """Until a robot has touched something there is no cache to drop, and each step equals the stock environment's: to the bit for the robots that
    move in a plane, to rounding (the orientation is normalised when it is written back) for Ant and Humanoid."""
    env, stock = make(env_id, seed=1), gym.make(env_id, disable_env_checker=True)
    stock.reset(seed=0)
    tolerance = 1e-12 if "Ant" in env_id or "Humanoid" in env_id else 0
    compared = 0
    for seed in range(10):
        env.reset(seed=seed)
        stock.reset(seed=seed)
        rng = np.random.default_rng(seed)
        for _ in range(5):
            action = env.random_action(rng)
            a, b = env.step(action), stock.step(action)
            np.testing.assert_allclose(a[0], b[0], rtol=0, atol=np.float32(tolerance))
            np.testing.assert_allclose(a[1], b[1], rtol=0, atol=1e6 * tolerance)
            assert a[2] == b[2]
            compared += 1
            if stock.unwrapped._p.getContactPoints():
                break
    assert compared >= 10


def test_bullet_long_rollouts_score_like_stock():
    """With contacts the trajectories part in the end (this is chaos), but not the scores: the same 60 start states and action sequences on both."""
    env, stock = make(HOPPER, seed=1), gym.make(HOPPER, disable_env_checker=True)
    stock.reset(seed=0)
    scores = []
    for seed in range(60):
        score = []
        for e in (env, stock):
            e.reset(seed=seed)
            rng, total, length, terminated = np.random.default_rng(seed), 0.0, 0, False
            while not terminated and length < 100:
                _, reward, terminated, _, _ = e.step(env.random_action(rng))
                total, length = total + reward, length + 1
            score.append((total, length))
        scores.append(score)
    returns, lengths = np.moveaxis(np.array(scores), 2, 0)
    for values in (returns, lengths):
        difference = values[:, 0] - values[:, 1]
        assert abs(difference.mean()) < 3 * difference.std(ddof=1) / np.sqrt(60) + 1e-9
        assert abs(difference.mean()) < 0.05 * abs(values[:, 1].mean())


@pytest.mark.parametrize("env_id", ["Hopper-v5", "Ant-v5", "Humanoid-v5", *CLASSIC_ENVS])
def test_mujoco_and_classic_steps_are_stock(env_id):
    env, stock = make(env_id, seed=1), gym.make(env_id, disable_env_checker=True)
    env.reset(seed=4)
    stock.reset(seed=4)
    rng = np.random.default_rng(0)
    for _ in range(60):
        action = env.random_action(rng)
        set_state(env, get_state(env))  # an idle restore changes nothing
        a, b = env.step(action), stock.step(action)
        assert same(a[:3], (b[0].astype(np.float32), *b[1:3]))
        if a[2] or b[3]:
            break


def test_rendering_is_headless_and_changes_nothing():
    plain, env = make(HOPPER, seed=1), make(HOPPER, seed=1, render_mode="rgb_array")
    env.reset()
    plain.reset()
    frames = []
    for i in range(12):
        frames.append(env.render())
        action = env.random_action(np.random.default_rng(i))
        assert same(env.step(action)[:4], plain.step(action)[:4])
        np.testing.assert_array_equal(get_state(env), get_state(plain))
    plain.close()  # the process's first connection to Bullet may be gone
    frames.append(env.render())
    assert frames[0].shape == (240, 320, 3) and frames[0].dtype == np.uint8
    assert frames[0].std() > 10 and not np.array_equal(frames[0], frames[-1])


# ---------------------------------------------------------------------------------------------------------------------- actions and refusals


@pytest.mark.parametrize("env_id", [HOPPER, "Hopper-v5", "Pendulum-v1", "MountainCarContinuous-v0"])
def test_actions_are_clipped_once_for_everybody(env_id):
    """An action out of bounds is worth exactly what the bound is worth, costs included; one inside is passed on to the bit."""
    env = make(env_id, seed=1)
    env.reset()
    state = get_state(env)
    high = env.action_space.high
    outside = env.step(3 * high)
    set_state(env, state)
    at_bound = env.step(high)
    assert same(outside[:4], at_bound[:4])
    np.testing.assert_array_equal(outside[4]["executed_action"], high)
    inside = (high * np.float32(0.3)).astype(np.float32)
    executed = env.step(inside)[4]["executed_action"]
    assert executed.dtype == np.float32 and np.array_equal(executed, inside)
    assert np.array_equal(env.step(inside.astype(np.float64))[4]["executed_action"], inside)
    inside[:] = 0
    assert executed.all()  # a copy


def one_sentence(error, *words):
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text


@pytest.mark.parametrize("action", [np.zeros(2), np.zeros((1, 3)), 0.5, ["a", "b", "c"]])
def test_wrong_action_shape(action):
    env = make(HOPPER)
    env.reset()
    with pytest.raises(ValueError) as error:
        env.step(action)
    one_sentence(error, "action must be an array of 3 numbers")


def test_wrong_actions_leave_the_environment_as_it_was():
    env, discrete = make(HOPPER, p_tremble=0.5), make("CartPole-v1")
    env.reset()
    discrete.reset()
    before = env.state_dict()
    with pytest.raises(ValueError, match="entry 1 is nan"):
        env.step(np.array([0.0, np.nan, 0.0]))
    assert env.state_dict() == before
    for action in (2, -1, 0.5, np.zeros(2, dtype=int)):
        with pytest.raises(ValueError, match="whole number from 0 to 1"):
            discrete.step(action)
    assert same(discrete.step(np.int64(1))[1:4], (1.0, False, False))


def test_step_before_reset():
    env = make("CartPole-v1")
    with pytest.raises(gym.error.ResetNeeded, match="reset"):
        env.step(0)
    set_state(env, get_state(env))
    env.step(0)


@pytest.mark.parametrize("p_tremble", [-0.1, 1.1, float("nan")])
def test_wrong_tremble_probability(p_tremble):
    with pytest.raises(ValueError, match="between 0 and 1"):
        make_env("CartPole-v1", p_tremble=p_tremble)


@pytest.mark.parametrize("horizon", [0, -5, 2.5])
def test_wrong_horizon(horizon):
    with pytest.raises(ValueError, match="at least 1 step"):
        make_env("CartPole-v1", horizon=horizon)
    assert make_env("CartPole-v1", horizon=np.int64(7)).horizon == 7


def test_wrong_states():
    env = make(HOPPER)
    env.reset()
    state = get_state(env)
    wrong = [(state[:-1], "shape"), (np.append(state, 0.0), "shape"), (state[None], "shape"), (get_state(make("CartPole-v1")), "shape")]
    for i, value, word in ((5, np.nan, "entry 5"), (9, np.inf, "entry 9"), (0, -1.0, "time step"), (0, 2.5, "time step")):
        changed = state.copy()
        changed[i] = value
        wrong.append((changed, word))
    for changed, word in wrong:
        with pytest.raises(ValueError) as error:
            set_state(env, changed)
        one_sentence(error, word)
    np.testing.assert_array_equal(get_state(env), state)  # a refused state changes nothing


def test_the_horizon_of_a_small_mdp_has_one_name():
    with pytest.raises(ValueError, match="T of Tree-v0 is its horizon: give horizon=5 instead"):
        make_env("Tree-v0", T=5)


@pytest.mark.parametrize("env_id", ["HoperBulletEnv-v0", "Hopper-v99", "no_such_package:Task-v0", "nonsense"])
def test_unknown_ids_list_the_known_ones(env_id):
    with pytest.raises(ValueError) as error:
        make_env(env_id)
    one_sentence(error, env_id, "known ids", HOPPER, "Hopper-v5", "CartPole-v1")


@pytest.mark.parametrize("package, missing, works, command", [
    ("mujoco", "Hopper-v5", HOPPER, "mujoco>=3.1.6,<4"),
    ("pybullet_envs_gymnasium", HOPPER, "Hopper-v5", "pip install pybullet-envs-gymnasium"),
])  # fmt: skip
def test_each_package_is_optional(package, missing, works, command):
    """In a new process, as an import can't be undone."""
    make(works)
    script = f"""
import sys
sys.modules[{package!r}] = sys.modules["pybullet"] = None  # not installed
if {package!r} == "mujoco": del sys.modules["pybullet"]
from utils.envs import make_env
make_env({works!r}).reset()
make_env("CartPole-v1").reset()
try:
    make_env({missing!r})
except ValueError as error:
    print(error)
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environ)
    assert len(result.stdout.splitlines()) == 1 and missing in result.stdout and command in result.stdout


# --------------------------------------------------------------------------------------------------------------------------- tasks of one's own


class Counter(gym.Env):
    """A task that nobody knows: it counts its steps, in double precision."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), dtype=np.float64)
    action_space = gym.spaces.Box(-1, 1, (1,), dtype=np.float32)

    def __init__(self, render_mode=None):
        self.count, self.offset = 0, 0.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.offset = 0, self.np_random.uniform()
        return np.array([self.count, self.offset]), {}

    def step(self, action):
        self.count += 1
        return np.array([self.count, self.offset]), self.offset + float(action[0]), False, False, {}


class SavedCounter(Counter):
    def get_state(self):
        return [self.count, self.offset]

    def set_state(self, state):
        self.count, self.offset = int(state[0]), float(state[1])
        return np.array([self.count, self.offset])


class Words(SavedCounter):
    observation_space = gym.spaces.Text(5)


@pytest.fixture
def register():
    def add(entry_point, **kwargs):
        gym.register("Own-v0", entry_point=entry_point, **kwargs)
        return "Own-v0"

    yield add
    gym.registry.pop("Own-v0", None)


def test_a_task_with_the_two_methods_is_accepted(register):
    env_id = register(SavedCounter, max_episode_steps=8)
    env, other = make_env(env_id, seed=1), make_env(env_id, seed=2, horizon=20)
    assert env.horizon == 8 and other.horizon == 20
    rows = play(env, 20)
    for before, state, action, (observation, reward, terminated, _), after in reversed(rows):
        np.testing.assert_array_equal(set_state(other, state), before)
        assert same(other.step(action)[:3], (observation, reward, terminated))
        np.testing.assert_array_equal(get_state(other), after)


def test_a_module_of_ones_own_registers_its_task(register, tmp_path, monkeypatch):
    """As in gymnasium.make: MODULE:ID."""
    (tmp_path / "own_module.py").write_text("import gymnasium, test_envs\ngymnasium.register('Own-v0', test_envs.SavedCounter, max_episode_steps=8)\n")
    (tmp_path / "lacking_module.py").write_text("import no_such_package\n")
    with pytest.raises(ValueError) as error:
        make_env("own_module:Own-v0")
    one_sentence(error, "'own_module:Own-v0'", "PYTHONPATH", "No module named 'own_module'")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError) as error:
        make_env("lacking_module:Own-v0")
    one_sentence(error, "'lacking_module:Own-v0'", "No module named 'no_such_package'")
    env = make_env("own_module:Own-v0", seed=1)
    assert env.unwrapped.spec.id == "Own-v0" and env.horizon == 8
    with pytest.raises(ValueError) as error:
        make_env("own_module:Own-v1")
    one_sentence(error, "'own_module:Own-v1'", "known ids")
    for env_id in MAZE_ENVS:
        with pytest.raises(ValueError) as error:
            make_env(f"utils.mazes:{env_id}")
        one_sentence(error, f"utils.mazes:{env_id} is a task of this repository: give {env_id}, without a module")


def test_evaluate_with_discrete_actions():
    """Always pushing to one side: the pole falls after 8 to 10 steps, each worth 1."""
    score = evaluate(make_env("CartPole-v1", seed=1), lambda observation: 0, 5)
    assert 8 <= score["length"] <= 10 and score["return"] == score["length"]


def test_a_mujoco_task_of_ones_own_can_borrow_the_wrapper(register):
    pytest.importorskip("mujoco")
    from gymnasium.envs.mujoco.hopper_v5 import HopperEnv

    class OwnHopper(HopperEnv):
        pass

    env_id = register(OwnHopper, max_episode_steps=50)
    with pytest.raises(ValueError) as error:
        make_env(env_id)
    one_sentence(error, "OwnHopper", "get_state()", "set_state(state)")
    gym.registry.pop(env_id)
    register(lambda **kwargs: MujocoState(OwnHopper(**kwargs)), max_episode_steps=50)
    env, other = make_env(env_id, seed=1), make_env(env_id, seed=2)
    for row in play(env, 20):
        set_state(other, row[1])
        assert same(other.step(row[2])[:4], row[3])


def test_unknown_tasks_say_what_to_implement(register):
    for entry_point in (Counter, lambda **kwargs: gym.wrappers.ClipReward(SavedCounter(), -1, 1)):
        env_id = register(entry_point, max_episode_steps=8)
        with pytest.raises(ValueError) as error:
            make_env(env_id)
        one_sentence(error, "get_state()", "set_state(state)")
        gym.registry.pop(env_id)
    env_id = register(SavedCounter)
    with pytest.raises(ValueError, match="register it with max_episode_steps, or give make_env a horizon"):
        make_env(env_id)
    assert make_env(env_id, horizon=5).horizon == 5
    gym.registry.pop(env_id)
    with pytest.raises(ValueError, match="flat arrays of numbers"):
        make_env(register(Words, max_episode_steps=8))
