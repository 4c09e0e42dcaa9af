"""algos/mmdp.py and the small MDPs of utils/envs.py by value: exact games, identities of the roll-outs, and whole small trainings, killed and resumed."""

import copy
import csv
import json
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import assert_close, generator

from algos import mmdp, tabular
from algos.mmdp import (
    Args,
    Network,
    RewardClass,
    Scripted,
    Table,
    Task,
    choose,
    cost_of_bins,
    draw_noise,
    evaluate,
    expert_moments,
    load_expert,
    per_action,
    roll_out,
    solve,
    solve_exactly,
    train,
)
from utils.demos import record, save
from utils.envs import get_state, make_env, set_state

CONTINUOUS = ("Pendulum-v1", "MountainCarContinuous-v0")
CLASSIC = ("CartPole-v1", "MountainCar-v0", "Acrobot-v1", *CONTINUOUS)
QUICK = {"horizon": 6, "bc_steps": 20, "policy_steps": 5, "rollouts_per_timestep": 6, "n_features": 8, "eval_episodes": 20, "n_demos": 3}
TREE = {"env_id": "Tree-v0", "horizon": 4, "p_tremble": 0.0, "n_demos": 1, "eval_episodes": 10}


@pytest.fixture(autouse=True)
def no_tensorboard(monkeypatch):
    """Its files cost more time than these trainings."""

    class Nothing:
        def __init__(self, *args, **kwargs):
            pass

        add_scalar = flush = close = lambda self, *args: None

    monkeypatch.setattr(mmdp, "SummaryWriter", Nothing)


def run(folder, **changes):
    """The scores, the policies and the rows of metrics.csv (without seconds) of a training."""
    args = Args(**changes)
    folder.mkdir(parents=True, exist_ok=True)
    scores = train(args, folder)
    saved = torch.load(folder / "policy.pt", weights_only=True)
    with open(folder / "metrics.csv", newline="") as file:
        rows = [{key: value for key, value in row.items() if key != "charts/seconds"} for row in csv.DictReader(file)]
    return scores, saved, rows


# ------------------------------------------------------------------------------------------------------------------------------ small MDPs


@pytest.mark.parametrize("make, env_id, states", [(tabular.make_cliff, "Cliff-v0", range(6)), (tabular.make_dante, "Dante-v0", range(3))])
def test_cliff_and_dante_are_those_of_the_theory(make, env_id, states):
    """Every transition, reward, expert's action and mistake, one by one, as in algos/tabular.py, whose values are tested against closed forms."""
    mdp, pi = make(5, 0.1)
    env = make_env(env_id, horizon=5, eps=0.1)
    task = env.unwrapped
    assert env.reset()[0].tolist() == [mdp.start] and env.horizon == 5
    for s in states:
        for a in range(env.action_space.n):
            set_state(env, np.array([0, 0, s]))
            observation, reward, terminated, truncated, _ = env.step(a)
            assert mdp.P[s, a].argmax() == observation[0] or (env_id == "Cliff-v0" and s == 4)  # what follows the last decision does not matter
            assert reward == mdp.r[s, a] and not terminated and not truncated
    for t in range(5):
        np.testing.assert_array_equal(np.eye(env.action_space.n)[task.expert_actions[t]], mdp.pi_E[t, mdp.start])
        given = task.given_policy(t + 1)
        if t == 0 and env_id == "Dante-v0":
            assert given is None
        else:
            np.testing.assert_allclose(given, pi[t, min(t, 1)])
    assert make_env(env_id, horizon=5).unwrapped.given_policy(1) is None


def test_tree():
    """Of A^T paths one pays, with 1 at its last step; observations are the path; decisions end at T."""
    env = make_env("Tree-v0", horizon=3, n_actions=3, expert_seed=4)
    paying = []
    for path in np.ndindex(3, 3, 3):
        observation, _ = env.reset()
        assert observation.tolist() == [-1, -1, -1]
        rewards = []
        for k, a in enumerate(path):
            observation, reward, terminated, truncated, _ = env.step(a)
            assert observation.tolist() == [*path[: k + 1], *[-1] * (2 - k)] and not terminated and truncated == (k == 2)
            rewards.append(reward)
        assert rewards[:2] == [0, 0]
        paying += [list(path)] if rewards[2] == 1 else []
        leaf, task = observation[None], env.unwrapped
        assert task.move(leaf, np.array([1])).tolist() == leaf.tolist() and task.reward(leaf, np.array([1])) == 0  # a leaf stays what it is
    assert paying == [env.unwrapped.expert_actions.tolist()]
    assert len({tuple(make_env("Tree-v0", horizon=12, expert_seed=seed).unwrapped.expert_actions) for seed in range(5)}) == 5


def test_small_mdps_are_ordinary_gymnasium_environments():
    for env_id, T in (("Tree-v0", 8), ("Cliff-v0", 10), ("Dante-v0", 10)):
        env = gym.make(env_id)
        env.reset(seed=0)
        assert [env.step(0)[3] for _ in range(T)] == [False] * (T - 1) + [True]
        env, other = make_env(env_id), make_env(env_id)
        env.reset()
        env.step(1)
        state = get_state(env)
        np.testing.assert_array_equal(set_state(other, state), env.observation)
        assert [other.step(0)[3] for _ in range(T - 1)] == [False] * (T - 2) + [True]


@pytest.mark.parametrize(
    "env_id, kwargs, words",
    [
        ("Tree-v0", {"horizon": 0}, "T is 0"),
        ("Dante-v0", {"horizon": 2.5}, "T is 2.5"),
        ("Cliff-v0", {"horizon": 20, "eps": 0.06}, "eps T is 0.06 * 20 = 1.2"),
        ("Dante-v0", {"horizon": 10, "eps": -0.01}, "eps from 0 to 1/T"),
        ("Tree-v0", {"n_actions": 1}, "n_actions is 1"),
        ("CartPole-v1", {"n_actions": 3}, "n_actions"),
    ],
)
def test_bad_environments(env_id, kwargs, words):
    with pytest.raises(ValueError) as error:
        make_env(env_id, **kwargs)
    assert words in str(error.value) and "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------------------------------- batched classic control


@pytest.mark.parametrize("env_id", CLASSIC)
def test_batched_steps_are_the_environments(env_id):
    """From start states and wherever random actions lead, to the last digits: next state, observation, reward of Pendulum, ending."""
    env, rng = make_env(env_id, seed=1, horizon=400), np.random.default_rng(0)
    task = Task(Args(env_id=env_id, horizon=400))
    n_ended, atol = 0, 1e-6 if task.continuous else 1e-9  # single precision, of the actions at least
    for _ in range(6):
        env.reset()
        ended, kick = False, rng.normal(size=len(env.unwrapped.state)) * (env_id != "CartPole-v1")
        state = get_state(env)
        state[3 : 3 + len(kick)] = np.clip(state[3 : 3 + len(kick)] + kick, -1, 0.05 if "Car" in env_id else 9)
        set_state(env, state)
        for _ in range(300):
            before, action = np.array(env.unwrapped.state, dtype=float), task.experts[0].act(env.observation[None])[0]
            action = task.random_actions(1, rng)[0] if rng.random() < 0.3 else action
            observation, reward, ended, _, _ = env.step(np.reshape(task.to_env(action), env.action_space.shape))
            after, batched_end = task.step(np.stack([before, before]), np.array([action, action]))
            np.testing.assert_allclose(after, [env.unwrapped.state] * 2, rtol=1e-9, atol=atol)
            np.testing.assert_allclose(task.observe(after)[1], observation, atol=1e-6)
            if env_id == "Pendulum-v1":
                assert task.reward(before[None], np.array([action]))[0] == pytest.approx(reward, abs=1e-5)
            assert batched_end.tolist() == [ended] * 2
            if ended:
                n_ended += 1
                break
    assert n_ended > 0 or env_id in ("CartPole-v1", "Pendulum-v1")


def test_cartpole_falls():
    task = Task(Args())
    states = np.array([[2.39, 5, 0, 0], [-2.39, -5, 0, 0], [0, 0, 0.2, 2], [0, 0, -0.2, -2], [0, 0, 0.2, -2]], dtype=float)
    assert task.step(states, np.ones(5, dtype=int))[1].tolist() == [True, True, True, True, False]


@pytest.mark.parametrize("env_id, T", [("CartPole-v1", 30), ("MountainCar-v0", 150)])
def test_return(env_id, T):
    """J of a policy of fixed actions by make_env's own steps: CartPole, the number of steps; MountainCar, what is left at the goal."""
    args = Args(env_id=env_id, horizon=T, p_tremble=0.0, eval_episodes=8)
    task = Task(args)
    act = (lambda o: np.ones(len(o), dtype=int)) if env_id == "CartPole-v1" else task.experts[0].act
    env, lengths = task.make_env((3, 1)), []
    for _ in range(8):
        observation, _ = env.reset()
        for k in range(1, T + 1):
            observation, _, terminated, truncated, _ = env.step(act(observation[None])[0])
            if terminated or truncated:
                lengths.append(k)
                break
    score = evaluate(args, task, [[Scripted(act)] * T], (3,))
    expected = np.array(lengths) if env_id == "CartPole-v1" else T - np.array(lengths)
    assert 0 < expected.min() < T
    assert (task.start_states(3, (1,)) != task.start_states(3, (2,))).any()
    assert score == {"return": pytest.approx(expected.mean()), "return_std": pytest.approx(expected.std())}


def test_interactions_and_trembling():
    """An ended episode costs no more interactions; a trembling step executes the noise's action, and phi sees the policy's own."""
    args = Args(horizon=40, p_tremble=0.0)
    task = Task(args)
    expert = load_expert(args, task)
    rewards, states = RewardClass(args, task, expert), expert.states[:3, 0]
    right, zeros = [Scripted(lambda o: np.ones(len(o), dtype=int))] * 40, np.zeros((3, 40))
    falling = roll_out(task, right, states, 1, (zeros, zeros > 0, zeros.astype(int)), rewards)
    assert falling[2] == falling[1].sum() < 3 * 40
    left = roll_out(task, [Scripted(lambda o: np.zeros(len(o), dtype=int))] * 40, states, 1, (zeros, zeros > 0, zeros.astype(int)), rewards)
    trembled = roll_out(task, right, states, 1, (zeros, zeros == 0, zeros.astype(int)), rewards)
    np.testing.assert_array_equal(trembled[1], left[1])
    assert np.abs(trembled[0] - left[0]).max() > 0.1
    dante = Task(Args(env_id="Dante-v0", horizon=2))
    down = np.zeros((1, 2)), np.ones((1, 2), dtype=bool), np.full((1, 2), 2)
    assert roll_out(dante, dante.experts, np.ones((1, 1)), 1, down)[1] == 0  # the true reward is that of what was executed
    noise = draw_noise(2000, 5, Args(p_tremble=0.3), dante, np.random.default_rng(0))
    assert noise[1].mean() == pytest.approx(0.3, abs=0.02) and np.bincount(noise[2].reshape(-1)) / 10000 == pytest.approx([1 / 3] * 3, abs=0.02)


def test_sampled_actions_have_the_policys_probabilities():
    args = Args(env_id="Dante-v0", horizon=1, p_tremble=0.0)
    task = Task(args)
    rewards = RewardClass(args, task, None)
    noise = draw_noise(20_000, 1, args, task, np.random.default_rng(0))
    J = roll_out(task, [Table([0.2, 0.5, 0.3])], np.full((20_000, 1), 1, dtype=np.float32), 1, noise, rewards)[1]
    assert J.mean() == pytest.approx(0.7, abs=0.01)


def test_network_acts_by_its_most_probable_action_or_by_sampling():
    policy, observations, _, _ = random_game(0)
    with torch.no_grad():
        logits = policy(torch.from_numpy(observations)).numpy().astype(float)
    np.testing.assert_array_equal(policy.probabilities(observations), np.eye(3)[logits.argmax(1)])
    policy.deterministic = False
    np.testing.assert_allclose(policy.probabilities(observations), np.exp(logits) / np.exp(logits).sum(1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_probabilities_that_rounding_leaves_below_1(env_id):
    """A draw above their sum takes the last action, or the last bin."""
    task = Task(Args(env_id=env_id, n_bins=2))
    low, high = choose(task, Table([0.5, 0.5 - 1e-7]), np.zeros((2, 4)), np.array([0.4, 1 - 1e-9]))
    assert 0 <= low < 1 <= high < 2


def test_network_sees_observations_in_units_of_the_demonstrations_spread():
    center, spread, rng = np.array([1.0, -2.0]), np.array([0.5, 4.0]), np.random.default_rng(0)
    policy, plain = Network(center, spread, 3, deterministic=True), Network(np.zeros(2), np.ones(2), 3, deterministic=True)
    plain.net.load_state_dict(policy.net.state_dict())
    observations = rng.normal(size=(20, 2))
    standard = torch.from_numpy(np.float32((observations - center) / spread))
    assert_close(policy(torch.from_numpy(np.float32(observations))), plain(standard))


def test_cloning_is_cross_entropy_at_a_falling_rate(monkeypatch):
    """Adam's first step against plain torch, and the rate of each of four steps."""
    policy, observations, _, _ = random_game(0, n=50)
    plain, actions, rates = copy.deepcopy(policy), np.random.default_rng(0).integers(3, size=50), []

    class SpyAdam(torch.optim.Adam):
        def step(self):
            rates.append(self.param_groups[0]["lr"])
            super().step()

    monkeypatch.setattr(torch.optim, "Adam", SpyAdam)
    mmdp.clone(policy, observations, actions, Args(bc_steps=1, learning_rate=1e-3), generator(3))
    batch = torch.randint(50, (256,), generator=generator(3)).numpy()
    log_probabilities = torch.log_softmax(plain(torch.from_numpy(observations[batch])), 1)
    (-log_probabilities[np.arange(256), actions[batch]].mean()).backward()
    for new, old in zip(policy.parameters(), plain.parameters(), strict=True):
        assert_close(new, old - 1e-3 * old.grad / (old.grad.abs() + 1e-8), atol=1e-5)  # Adam's first step is that long whatever the gradient
    rates.clear()
    mmdp.clone(policy, observations, actions, Args(bc_steps=4, learning_rate=0.1), generator())
    assert rates == pytest.approx([0.1, 0.075, 0.05, 0.025])


# ------------------------------------------------------------------------------------------------------------------- continuous actions


def test_bins():
    """Equal parts of the box, each with its lower edge; the box's upper end is in the last one; trembles are uniform on the box."""
    task = Task(Args(env_id="Pendulum-v1", n_bins=8))
    edges = np.arange(-2, 2.5, 0.5)
    np.testing.assert_array_equal(task.to_env(np.arange(9)), edges)
    assert np.floor(task.from_env(edges)).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 7]
    assert np.floor(task.from_env(edges[1:] - 1e-9)).tolist() == [*range(8)]
    torques = task.to_env(task.random_actions(40_000, np.random.default_rng(0)))
    np.testing.assert_allclose(task.to_env(task.from_env(torques)), torques, atol=1e-12)
    np.testing.assert_allclose(np.quantile(torques, (0, 0.1, 0.5, 1)), (-2, -1.6, 0, 2), atol=0.03)
    discrete = Task(Args())
    assert discrete.from_env(1) == discrete.to_env(1) == 1 and discrete.random_actions(99, np.random.default_rng(0)).dtype.kind == "i"


def test_a_policy_is_a_density():
    """Evenly spaced draws come out with the bins' probabilities, which sum to 1, and evenly spread inside; a deterministic network's all in one bin."""
    task, draws = Task(Args(env_id="Pendulum-v1", n_bins=4)), (np.arange(10_000) + 0.5) / 10_000
    for p in ([0.2, 0.5, 0, 0.3], [0, 0, 1, 0]):
        actions = choose(task, Table(np.float32(p)), np.zeros((10_000, 3), dtype=np.float32), draws)
        assert np.bincount(actions.astype(int), minlength=4) / 10_000 == pytest.approx(p, abs=2e-4)
        for k in np.flatnonzero(p):
            inside = np.sort(actions[actions.astype(int) == k]) - k
            np.testing.assert_allclose(inside, (np.arange(len(inside)) + 0.5) / len(inside), atol=1e-3)


@pytest.mark.parametrize("how", ["all", "uniform"])
def test_importance_weights_of_a_density(how):
    """The weighted estimate of E[sum f] of a first action from a policy's density and an action after it, against quadrature over both: |z| < 4 per feature."""
    args = Args(env_id="Pendulum-v1", horizon=2, n_bins=3, n_demos=2, n_features=4, p_tremble=0.0)
    task, rng, n = Task(args), np.random.default_rng(1), 20_000
    rewards, state, p = RewardClass(args, task, load_expert(args, task)), np.array([[0.5, -1.0]]), np.array([0.1, 0.6, 0.3])
    later, repeat = Table([0.5, 0.0, 0.5]), 3 if how == "all" else 1
    noise = [x.repeat(repeat, axis=0) for x in draw_noise(n, 2, args, task, rng)]
    first_actions = np.tile(np.arange(3), n) + noise[0][:, 0] if how == "all" else task.random_actions(n, rng)
    results = roll_out(task, [None, later], state.repeat(n * repeat, axis=0), 1, noise, rewards, first_actions)[0]
    moments = per_action(results, np.zeros((n, 3)), first_actions.astype(int), 3, exact=False)
    estimates = (p[:, None] * moments).sum(1)
    a = (np.arange(300) + 0.5) / 100  # a fine grid over [0, 3)
    states = state.repeat(300, axis=0)
    after, second = task.step(states, a)[0].repeat(300, axis=0), np.tile(a, 300)
    follow = rewards.phi(after, second).reshape(300, 300, 4) * (np.array([0.5, 0, 0.5])[a.astype(int)] / 100)[:, None]
    exact = ((rewards.phi(states, a) + follow.sum(1)) * (p[a.astype(int)] / 100)[:, None]).sum(0)
    z = (estimates.mean(0) - exact) / (estimates.std(0) / np.sqrt(n))
    assert np.abs(z).max() < 4 and (estimates.std(0) / np.sqrt(n)).max() < 0.02


def test_cost_of_bins():
    """From the policy all roll-outs count, of uniform ones about M/A, of each bin once M/A; uniform ones are noisiest. Fine bins give the expert."""
    args = Args(env_id="Pendulum-v1", horizon=8, n_demos=5, rollouts_per_timestep=50, eval_episodes=500)
    J, task = [], Task(args)
    for A, line in zip((5, 10, 50), cost_of_bins(args)[1:], strict=True):
        J.append(float(line.split(" J ")[1].split(",")[0]))
        spreads, counts = zip(*[(float(part.split()[-2]), int(part.split("(")[1].rstrip(")"))) for part in line.split(", ") if "(" in part], strict=True)
        assert counts[0] == 50 and counts[2] == 50 / A and abs(counts[1] - 50 / A) <= 1
        assert spreads[1] > 1.1 * max(spreads[0], spreads[2])
    assert J[2] == pytest.approx(evaluate(args, task, [task.experts], (1, 10))["return"], abs=0.2)


@pytest.mark.parametrize("env_id", CONTINUOUS)
def test_expert_actions_are_the_environments(env_id, tmp_path):
    """Recorded or read from a file: torques between the box's ends, where the expert's own rule puts them."""
    args = Args(env_id=env_id, horizon=20, n_demos=2)
    task = Task(args)
    expert = load_expert(args, task)
    own = task.experts[0].act(task.observe(expert.states[expert.alive]))
    np.testing.assert_allclose(expert.actions[expert.alive], own, atol=1e-4)
    assert len(np.unique(expert.actions.astype(int))) > 3 and expert.actions.max() < task.n_actions
    env = task.make_env((1, 1))
    demos = record(env, lambda o: task.to_env(task.experts[0].act(o[None])).reshape(1), 2, "a test")
    save(tmp_path / "demos.npz", demos)
    args.demos = str(tmp_path / "demos.npz")
    np.testing.assert_array_equal(load_expert(args, task).actions, expert.actions)


# ----------------------------------------------------------------------------------------------------------------------------- identities


@pytest.mark.parametrize("env_id, T", [("MountainCar-v0", 150), ("Cliff-v0", 6)])
def test_performance_difference_identity(env_id, T):
    """E_expert[sum phi] - E_pi[sum phi] = T sum_t g_t(pi^t) at the paper's payoff, feature by feature, and so for the true return; no noise, no sampling."""
    args = Args(env_id=env_id, horizon=T, p_tremble=0.0, n_demos=4, n_features=16)
    task = Task(args)
    expert = load_expert(args, task)
    rewards, rng = RewardClass(args, task, expert), np.random.default_rng(0)
    if task.small:
        policies = [Table(np.eye(2)[a]) for a in (0, 0, 1, 0, 1, 1)]
    else:  # the expert's, but for a mistake now and then, so that some reach the goal and some do not
        policies = [Scripted(lambda o: np.zeros(len(o), dtype=int)) if rng.random() < 0.15 else task.experts[0] for _ in range(T)]

    def play(t, first_actions=None):
        noise = np.zeros((4, T - t + 1)), np.zeros((4, T - t + 1), dtype=bool), np.zeros((4, T - t + 1), dtype=int)
        return roll_out(task, policies, expert.states[:, t - 1], t, noise, rewards, first_actions)

    sums, difference = np.zeros((4, rewards.K)), np.zeros(4)
    for t in range(1, T + 1):
        with_expert, own = play(t, expert.actions[:, t - 1]), play(t)
        alive = expert.alive[:, t - 1]
        sums[alive] += (with_expert[0] - own[0])[alive]
        difference[alive] += (with_expert[1] - own[1])[alive]
    moments, returns, _ = play(1)
    np.testing.assert_allclose(sums, expert_moments(task, rewards, expert)[:, 0] - moments, atol=1e-9)
    J_E = np.zeros(4) if task.small else T - expert.alive.sum(1)
    np.testing.assert_allclose(difference, J_E - returns, atol=1e-9)
    assert np.abs(difference).max() > 1


def test_expert_moments_of_the_absorbing_state():
    args = Args(env_id="MountainCar-v0", horizon=150, n_demos=2, n_features=8)
    task = Task(args)
    expert = load_expert(args, task)
    rewards = RewardClass(args, task, expert)
    moments, lengths = expert_moments(task, rewards, expert), expert.alive.sum(1)
    assert (lengths < 150).all()
    for e, length in enumerate(lengths):
        np.testing.assert_allclose(moments[e, length], (150 - length) * rewards.absorbed)
        last = rewards.phi(expert.states[e, length - 1 : length], expert.actions[e, length - 1 : length])[0]
        np.testing.assert_allclose(moments[e, length - 1], last + moments[e, length])


def test_features_of_the_observation_the_action_and_the_flag():
    """sqrt(2 / K) cos(z @ frequencies + phases), z the observation in units of the demonstrations' spread, a continuous action from -1 to 1, and a 1."""
    args = Args(env_id="Pendulum-v1", horizon=4, n_demos=2, n_features=5)
    task = Task(args)
    expert = load_expert(args, task)
    rewards, observations = RewardClass(args, task, expert), task.observe(expert.states.reshape(-1, 2))
    rewards.frequencies, rewards.phases = np.eye(5), np.full(5, 0.3)
    standard = (observations - observations.mean(0)) / (observations.std(0) + 1e-6)
    bins = np.array([0.0, 2.5, 5.0, 1.0, 4.0, 3.0, 0.5, 2.0])  # a place on the action range, in bins
    z = np.column_stack([standard, [-1, 0, 1, -0.6, 0.6, 0.2, -0.8, -0.2], np.ones(8)])
    np.testing.assert_allclose(rewards.phi(expert.states.reshape(-1, 2), bins), np.sqrt(2 / 5) * np.cos(z + 0.3), rtol=1e-12)


def test_rewards_and_clone_of_the_tree(tmp_path):
    """One reward for each of the 8 leaves, 1 for the step into it and else 0; a policy is uniform where it knows nothing."""
    args = Args(**TREE | {"horizon": 3})
    task = Task(args)
    expert = load_expert(args, task)
    rewards = RewardClass(args, task, expert)
    steps = [(path[:t], path[t]) for path in np.ndindex(2, 2, 2) for t in range(3)]
    phi = rewards.phi(np.array([[*before, *[-1] * (3 - len(before))] for before, _ in steps]), np.array([action for _, action in steps]))
    leaves = [{(*steps[i][0], steps[i][1]) for i in np.flatnonzero(column)} for column in phi.T]
    assert sorted(map(list, leaves)) == [[path] for path in np.ndindex(2, 2, 2)]
    _, saved, _ = run(tmp_path, **TREE)
    assert all(policy["default"].tolist() == [0.5, 0.5] for policy in (*saved["sequences"][0], *saved["bc"]))


# ------------------------------------------------------------------------------------------------------------------------------- the game


def random_game(seed, n=5, A=3, K=16):
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    policy = Network(np.zeros(2), np.ones(2), A, deterministic=True)
    return policy, rng.normal(size=(n, 2)).astype(np.float32), rng.normal(size=(n, K)), rng.normal(size=(n, A, K))


def test_closed_form_of_the_inner_maximum():
    """solve's payoff is max over |w| <= 1 of <w, g>: no w of the ball does better, found here by the linear program over a fine polytope of tangents."""
    policy, observations, targets, moments = random_game(0, K=2)
    payoff = solve(policy, observations, targets, moments, 7, None, Args(policy_steps=0))
    with torch.no_grad():
        pi = torch.softmax(policy(torch.from_numpy(observations)), 1).numpy()
    g = (targets - (pi[:, :, None] * moments).sum(1)).mean(0) / 7
    angles = np.linspace(0, 2 * np.pi, 3001)
    ball = mmdp.linprog(-g, np.stack([np.cos(angles), np.sin(angles)], 1), np.ones(3001), bounds=(None, None))
    assert payoff == pytest.approx(np.linalg.norm(g), rel=1e-5)
    assert -ball.fun == pytest.approx(payoff, rel=1e-5)
    w = np.array([0.3, -0.2])
    assert solve(policy, observations, targets, moments, 7, w, Args(policy_steps=0)) == pytest.approx(w @ g, rel=1e-4)


def test_network_reaches_the_games_value():
    """One state, two actions: the least |g| is the distance of the target to a segment. And for a given f, the greedy action."""
    policy, observations, targets, moments = random_game(3, n=1, A=2)
    a, b, c = moments[0, 0], moments[0, 1], targets[0]
    share = np.clip((c - a) @ (b - a) / ((b - a) @ (b - a)), 0, 1)
    value = np.linalg.norm(c - a - share * (b - a)) / 7
    assert 0.05 < share < 0.95
    assert solve(policy, observations, targets, moments, 7, None, Args(policy_steps=400)) == pytest.approx(value, rel=1e-3)
    w = np.random.default_rng(2).normal(size=16)
    assert solve(policy, observations, targets, moments, 7, w, Args(policy_steps=400)) == pytest.approx(min(w @ (c - a), w @ (c - b)) / 7, abs=5e-3)


@pytest.mark.parametrize("negations", [False, True])
def test_exact_solution(negations):
    """Against all mixtures on a grid; and where every policy is as good, each action is drawn alike."""
    rng = np.random.default_rng(0)
    for _ in range(5):
        target, moments = rng.normal(size=3), rng.normal(size=(1, 3, 3))
        pi, payoff = solve_exactly(target, moments, negations, rng)
        grid = np.array([(i, j, 200 - i - j) for i in range(201) for j in range(201 - i)]) / 200
        g = target - grid @ moments[0]
        values = (np.abs(g) if negations else g).max(1)
        own = target - pi[0] @ moments[0]
        assert payoff == pytest.approx((np.abs(own) if negations else own).max(), abs=1e-4)
        assert values.min() - 0.05 < payoff <= values.min() + 1e-6
        assert pi.sum() == pytest.approx(1) and pi.min() >= 0
    drawn = np.mean([solve_exactly(np.ones(2), np.zeros((2, 3, 2)), negations, rng)[0] for _ in range(100)], axis=0)
    assert drawn == pytest.approx(np.full((2, 3), 1 / 3), abs=4 * np.sqrt(2 / 9 / 100))


def test_importance_weights():
    """n(s)/n(s, a) gives means of each state and action; A gives an unbiased estimate."""
    observations, actions = np.array([[0], [0], [0], [1]], dtype=np.float32), np.array([0, 0, 1, 1])
    results = np.array([[1.0], [3.0], [5.0], [7.0]])
    exact = per_action(results, observations, actions, 2, exact=True)
    assert exact[:3].sum(0).tolist() == [[3 * 2], [3 * 5]] and exact[3].tolist() == [[0], [7]]
    assert per_action(results, observations, actions, 2, exact=False)[:, :, 0].tolist() == [[2, 0], [6, 0], [0, 10], [0, 14]]
    assert per_action(np.arange(8.0)[:, None], observations, None, 2, exact=False)[:, :, 0].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Tree-v0"])
def test_no_regret_maximises_the_regularised_payoff(env_id):
    args = Args(env_id=env_id, horizon=3, n_features=8, n_demos=2)
    task = Task(args)
    rewards, rng = RewardClass(args, task, load_expert(args, task)), np.random.default_rng(0)
    small = task.small
    for i in (1, 4):
        strength = 0.1 / np.sqrt(i)
        gap = rng.normal(size=8) * 0.1

        def value(w, gap=gap, strength=strength):
            return gap @ w + strength * (-(w * np.log(w + 1e-300)).sum() if small else -(w @ w) / 2)

        w = rewards.no_regret(gap, i)
        others = rng.dirichlet(np.ones(8), 500) if small else (x := rng.normal(size=(500, 8))) / np.maximum(1, np.linalg.norm(x, axis=1))[:, None]
        assert value(w) >= max(value((1 - step) * w + step * other) for other in others for step in (0.01, 0.3, 1)) - 1e-12
        if small:
            np.testing.assert_allclose(np.log(w) - np.log(w[0]), (gap - gap[0]) / strength)
            rewards.negations = True  # a mixture of the 8 rewards and their negations, and so a weight in [-1, 1] for each
            np.testing.assert_allclose(rewards.no_regret(gap, i), np.sinh(gap / strength) / np.cosh(gap / strength).sum())
            rewards.negations = False
    if not small:
        np.testing.assert_allclose(rewards.no_regret(np.full(8, 1e-3), 4), 2e-2)
        assert np.linalg.norm(rewards.no_regret(np.ones(8), 1)) == pytest.approx(1)
        np.testing.assert_allclose(rewards.no_regret(np.full(8, 1e-3), 1), 1e-2)


# ------------------------------------------------------------------------------------------------------------------- theory, by the algorithm


def on_path(saved, expert_actions):
    """Probability of the expert's action at the expert's state, for each t."""
    (sequence,) = saved["sequences"]
    rows = [state["probabilities"].numpy() for state in sequence]
    assert all(len(p) == 1 for p in rows)
    return np.array([p[0, a] for p, a in zip(rows, expert_actions, strict=True)])


def test_tree_interactions_and_probability_of_success(tmp_path):
    """M T(T+1)/2 interactions, to the step, and P(success) = (1 - (1 - 1/A)^(M + 1))^T: |z| < 3 for M = 2, A = 2, T = 4."""
    n, solved = 40, 0
    for seed in range(n):
        args = TREE | {"seed": seed, "rollouts_per_timestep": 2, "first_actions": "uniform"}
        _, saved, rows = run(tmp_path / str(seed), **args)
        solved += on_path(saved, Task(Args(**args)).mdp.expert_actions).prod() == 1
        assert [int(row["charts/timesteps"]) for row in rows] == [2, 6, 12, 20]
    p = (1 - 0.5**3) ** 4
    assert abs(solved - n * p) < 3 * np.sqrt(n * p * (1 - p))


@pytest.mark.parametrize("payoff", ["paper", "suffix"])
def test_tree_needs_no_luck_with_each_action_once(payoff, tmp_path):
    """M = A roll-outs of all actions: always solved, in A T(T+1)/2."""
    for seed in range(4):
        scores, saved, rows = run(tmp_path / str(seed), **TREE | {"seed": seed, "n_actions": 3, "rollouts_per_timestep": 3, "payoff": payoff})
        assert scores["MMDP"] == 1 and int(rows[-1]["charts/timesteps"]) == 3 * 4 * 5 / 2


@pytest.mark.parametrize("payoff, negations, choice", [("paper", False, 0), ("paper", True, 1), ("suffix", False, 0), ("suffix", True, 0)])
def test_dante(payoff, negations, choice, tmp_path):
    """The README's three rows: up (0) and no gap; stay (1) and BC's gap eps T (T-1) = 1.8 with the paper's payoff closed under negation."""
    args = {"env_id": "Dante-v0", "horizon": 10, "eps": 0.02, "p_tremble": 0.0, "n_demos": 1, "rollouts_per_timestep": 300, "eval_episodes": 2000}
    scores, saved, rows = run(tmp_path, **args, payoff=payoff, negations=negations)
    if (payoff, negations) != ("paper", True):  # there it is a tie: 0.82 up + 0.18 down earn as little as staying
        assert saved["sequences"][0][0]["probabilities"].tolist() == [np.eye(3)[choice].tolist()]
    noise = 4 * np.sqrt(0.2 * 0.8 / 2000) * 9
    assert scores["BC"] == pytest.approx(10 - 1.8, abs=noise) and scores["scripted expert"] == 10
    # A tie's mixture earns what staying earned in 100 roll-outs.
    assert scores["MMDP"] == (10 if choice == 0 else pytest.approx(10 - 1.8, abs=noise + 4 * np.sqrt(0.2 * 0.8 / 100) * 9))
    # The payoff at t = 1 for the chosen action, estimated from 100 roll-outs each, over T.
    expected = tabular.dante_payoffs(10, 0.02)[payoff, "{r, -r}" if negations else "{r}"][choice]
    assert float(rows[-1]["game/payoff"]) == pytest.approx(expected, abs=4 * np.sqrt(0.2 * 0.8 / 100) * 0.9)
    assert [row["game/payoff"] for row in rows[:-1]] == [""] * 9  # pi^2:T are given


def test_cliff(tmp_path):
    """The theorem's policy loses eps T^2 = 1; where nothing is given, MMDP finds the expert's."""
    args = {"env_id": "Cliff-v0", "horizon": 10, "p_tremble": 0.0, "n_demos": 1, "rollouts_per_timestep": 4, "eval_episodes": 4000}
    assert run(tmp_path / "eps", **args, eps=0.01)[0]["MMDP"] == pytest.approx(-1, abs=4 * np.sqrt(0.1 * 0.9 / 4000) * 10)
    assert run(tmp_path / "0", **args)[0]["MMDP"] == 0


def test_dual_on_the_tree(tmp_path):
    """Each outer iteration takes M T(T+1)/2, and the mixture is the expert's path almost always; the reward player's roll-outs are counted apart."""
    scores, saved, rows = run(tmp_path, **TREE | {"variant": "dual", "iterations": 3, "rollouts_per_timestep": 12, "n_rollouts": 5, "eval_episodes": 300})
    assert scores["MMDP"] == 1 and len(saved["sequences"]) == 3
    assert [int(rows[4 * i - 1]["charts/timesteps"]) for i in (1, 2, 3)] == [120, 240, 360]
    assert [int(rows[4 * i - 1]["charts/all_timesteps"]) for i in (1, 2, 3)] == [140, 280, 420]


def test_dual_answers_the_mean_gap_of_all_policies_so_far(tmp_path, monkeypatch):
    """f_i is the no-regret answer to (1/i) sum_j (E_expert[sum_t phi] - E_pi_j[sum_t phi]) / T, with pi_1 the clone and pi_j+1 the last sequence found."""
    changes = QUICK | {"variant": "dual", "iterations": 3, "n_rollouts": 4}
    args = Args(**changes)
    task = Task(args)
    expert, answered, rolled_out = load_expert(args, task), [], []
    phi = RewardClass(args, task, expert).phi(expert.states.reshape(-1, 4), expert.actions.reshape(-1))
    assert expert.alive.all()
    no_regret, roll_out = RewardClass.no_regret, mmdp.roll_out

    def spy_no_regret(self, gap, i):
        if len(answered) < i:  # again at each timestep
            answered.append(gap.copy())
        np.testing.assert_array_equal(gap, answered[i - 1])
        return no_regret(self, gap, i)

    def spy_roll_out(task, policies, states, t, noise, rewards=None, first_actions=None):
        result = roll_out(task, policies, states, t, noise, rewards, first_actions)
        if rewards is not None and first_actions is None:
            assert t == 1 and len(states) == 4
            rolled_out.append((mmdp.save_policies(policies), result[0].mean(0)))
        return result

    monkeypatch.setattr(RewardClass, "no_regret", spy_no_regret)
    monkeypatch.setattr(mmdp, "roll_out", spy_roll_out)
    _, saved, _ = run(tmp_path, **changes)
    gaps = [(phi.sum(0) / 3 - moments) / 6 for _, moments in rolled_out]
    np.testing.assert_allclose(answered, [np.mean(gaps[:i], axis=0) for i in (1, 2, 3)], rtol=1e-6, atol=1e-9)
    for (policies, _), expected in zip(rolled_out, (saved["bc"], *saved["sequences"][:2]), strict=True):
        assert all(torch.equal(policies[name], value.expand_as(policies[name])) for name, value in expected.items())


def test_mixture_draws_one_policy_an_episode():
    """Two halves of Dante's episodes, all rows down and all rows up: J is 0 or T, never between."""
    args = Args(env_id="Dante-v0", horizon=10, p_tremble=0.0, eval_episodes=100)
    score = evaluate(args, Task(args), [[Table([0, 0, 1])] * 10, [Table([1, 0, 0])] * 10], (1,))
    assert score == {"return": 5, "return_std": 5}


# ---------------------------------------------------------------------------------------------------------------------- whole trainings


def test_cartpole(tmp_path):
    for seed in (1, 2):
        scores, _, rows = run(tmp_path / str(seed), seed=seed, rollouts_per_timestep=32, eval_episodes=200, bc_steps=300, policy_steps=20)
        assert scores["MMDP"] >= 45 and scores["scripted expert"] >= 49
        assert int(rows[-1]["charts/timesteps"]) <= 32 * 50 * 51 / 2 and len(rows) == 50


def test_mmdp_learns_what_cloning_did_not(tmp_path):
    """From a last policy that was cloned in no step at all, the game alone leads to the expert's level."""
    scores, _, _ = run(tmp_path, rollouts_per_timestep=32, eval_episodes=200, bc_steps=0, policy_steps=50)
    assert scores["BC"] < 30 and scores["MMDP"] >= 45


@pytest.mark.parametrize(
    "changes", [{}, {"env_id": "Pendulum-v1", "n_bins": 3}, {"variant": "dual", "iterations": 2, "n_rollouts": 4}, TREE | {"variant": "dual", "iterations": 2}]
)
def test_killed_and_resumed(changes, tmp_path, monkeypatch):
    """Stopped at any row, and started again from the checkpoint before it: the same rows, policies and scores."""
    monkeypatch.setattr(mmdp, "SECONDS_BETWEEN_CHECKPOINTS", 0)
    args = QUICK | changes
    expected = run(tmp_path / "whole", **args)
    write = mmdp.Log.write
    for n in (1, 3, len(expected[2]) - 1):
        calls = iter(range(10**6))

        def dying(self, row, n=n, calls=calls):
            write(self, row)
            if next(calls) == n:
                raise KeyboardInterrupt

        monkeypatch.setattr(mmdp.Log, "write", dying)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / str(n), **args)
        monkeypatch.setattr(mmdp.Log, "write", write)
        scores, saved, rows = run(tmp_path / str(n), **args)
        assert scores == expected[0] and rows == expected[2]
        for a, b in zip((*saved["sequences"], saved["bc"]), (*expected[1]["sequences"], expected[1]["bc"]), strict=True):
            a, b = (x if isinstance(x, list) else [x] for x in (a, b))
            assert all(torch.equal(p[key], q[key]) for p, q in zip(a, b, strict=True) for key in q)


def test_each_policy_starts_from_the_next_ones(tmp_path):
    """With one Adam step a timestep, no weight moves by more than the learning rate from one policy to the one before it, and in T steps some do from BC."""
    _, saved, _ = run(tmp_path, **QUICK | {"policy_steps": 1, "learning_rate": 1e-3})
    chain = [*saved["sequences"][0]["net.2.weight"], saved["bc"]["net.2.weight"][0]]
    assert max((a - b).abs().max() for a, b in zip(chain[:-1], chain[1:], strict=True)) < 1.01e-3
    assert (chain[0] - chain[-1]).abs().max() > 2e-3


def test_where_every_demonstration_has_ended(tmp_path):
    """No expert state is left to reset to, and no action matters: those timesteps keep BC's policy and cost nothing; the one before them does not."""
    save(tmp_path / "falls.npz", record(make_env("CartPole-v1"), lambda observation: 1, 3, "a test"))
    changes = QUICK | {"horizon": 13, "demos": str(tmp_path / "falls.npz")}
    last = load_expert(Args(**changes), Task(Args(**changes))).alive.sum(1).max()
    assert 0 < last < 13
    _, saved, rows = run(tmp_path / "run", **changes)
    assert [row["game/t"] for row in rows] == [str(t) for t in range(13, 0, -1)]
    assert [row["game/payoff"] != "" for row in rows] == [t <= last for t in range(13, 0, -1)]
    assert [row["charts/timesteps"] == "0" for row in rows] == [t > last for t in range(13, 0, -1)]
    for name, weights in saved["sequences"][0].items():
        assert (weights[last:] == saved["bc"][name][0]).all()
    assert not torch.equal(saved["sequences"][0]["net.2.weight"][last - 1], saved["bc"]["net.2.weight"][0])


def test_what_training_depends_on(tmp_path):
    base = run(tmp_path / "base", **QUICK)
    assert run(tmp_path / "again", **QUICK)[2] == base[2]
    for change in ({"seed": 2}, {"p_tremble": 0.5}, {"payoff": "suffix"}, {"first_actions": "uniform"}, {"n_features": 9}):
        assert run(tmp_path / str(change), **QUICK | change)[2] != base[2], change
    changed = run(tmp_path / "eval", **QUICK | {"eval_episodes": 21})[2]
    assert [row["game/payoff"] for row in changed] == [row["game/payoff"] for row in base[2]]


@pytest.fixture
def command(monkeypatch, tmp_path):
    """python algos/mmdp.py ..., in this process, with runs under tmp_path."""
    monkeypatch.setattr(mmdp, "ROOT", tmp_path)

    def call(**flags):
        words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        monkeypatch.setattr(sys, "argv", ["mmdp.py", *words])
        mmdp.main()

    return call


def test_command_line(command, tmp_path, capsys):
    """Training ends with the numbers that --eval prints; demonstrations from a file give the run that recording them gives."""
    command(**QUICK)
    trained = capsys.readouterr().out.splitlines()[-3:]
    (folder,) = (tmp_path / "runs").iterdir()
    assert {"args.json", "metrics.csv", "policy.pt", "checkpoint.pt"} <= {path.name for path in folder.iterdir()}
    command(eval=folder)
    assert capsys.readouterr().out.splitlines() == trained
    task = Task(Args(**QUICK))
    env = task.make_env((1, 1))
    save(tmp_path / "demos.npz", record(env, lambda o: task.experts[0].act(o[None])[0], 4, "a test"))
    command(**QUICK, demos=tmp_path / "demos.npz")
    assert capsys.readouterr().out.splitlines()[-3:] == trained


@pytest.mark.parametrize("mode", ["resume", "eval"])
def test_a_run_of_another_script(mode, command, tmp_path):
    (tmp_path / "args.json").write_text(json.dumps({"exp_name": "filter_br", "seed": 1}))
    with pytest.raises(SystemExit, match="was made by filter_br, not by mmdp: use the script that made it"):
        command(**{mode: tmp_path})
    assert [path.name for path in tmp_path.iterdir()] == ["args.json"]


def test_an_interrupt_says_how_to_go_on(command, monkeypatch):
    write = mmdp.Log.write
    monkeypatch.setattr(mmdp.Log, "write", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(SystemExit, match="^interrupted; to go on: python .* --resume ") as exit:
        command(**QUICK)
    monkeypatch.setattr(mmdp.Log, "write", write)
    folder = Path(str(exit.value).split()[-1])
    assert not (folder / "policy.pt").exists()
    with mmdp.hold(folder), pytest.raises(SystemExit, match=f"^another process is at {folder}: wait for its end, or stop it$"):
        command(resume=folder)
    described = json.loads((folder / "args.json").read_text())
    begun = described | {"versions": described["versions"] | {"commit": "an older one"}}
    (folder / "args.json").write_text(json.dumps(begun))
    command(resume=folder)
    assert (folder / "policy.pt").exists() and json.loads((folder / "args.json").read_text()) == begun | {"resumed_with": [described["versions"]]}


def test_table(command, tmp_path, monkeypatch, capsys):
    """One command trains all, prints medians and draws them; a second call only reads; other arguments are refused."""
    monkeypatch.setattr(mmdp, "N_SEEDS", {"discrete": 2})
    monkeypatch.setattr(mmdp, "SETTINGS", {"discrete": (("CartPole-v1", 6, 0.2, ("paper", "suffix")), ("Dante-v0", 4, 0.5, ("paper",)))})
    flags = {"bc_steps": 5, "policy_steps": 1, "rollouts_per_timestep": 3, "eval_episodes": 4, "n_demos": 2}
    words = [str(word) for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value)]
    monkeypatch.setattr(sys, "argv", ["mmdp.py", "--table", "discrete", *words])
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="^interrupted; to go on: python mmdp.py --table discrete --bc-steps 5 "):
        patch.setattr(mmdp.Log, "write", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        mmdp.main()
    mmdp.main()
    text = (tmp_path / "runs" / "results" / "theory" / "mmdp.txt").read_text()
    assert capsys.readouterr().out.endswith(text) and (tmp_path / "runs" / "results" / "theory" / "mmdp.png").exists()
    assert "CartPole-v1, T = 6, p_tremble 0.2" in text and "MMDP suffix" in text
    args = Args(env_id="Dante-v0", horizon=4, p_tremble=0.5, eval_episodes=4)
    expert = Task(args)
    J = [evaluate(args, expert, [expert.experts], (seed, 10))["return"] for seed in (1, 2)]
    assert f"scripted expert {np.median(J):6.2f} [" in text
    monkeypatch.setattr(mmdp, "train", None)
    mmdp.main()
    assert (tmp_path / "runs" / "results" / "theory" / "mmdp.txt").read_text() == text
    one = tmp_path / "runs" / "mmdp_table" / "Dante-v0__paper__0.5__2" / "args.json"  # the code is that of the runs, not of whoever reads them
    made = json.loads(one.read_text())
    one.write_text(json.dumps(made | {"versions": made["versions"] | {"commit": "abc"}, "resumed_with": [made["versions"] | {"commit": "def"}]}))
    mmdp.main()
    again = (tmp_path / "runs" / "results" / "theory" / "mmdp.txt").read_text()
    assert ", commit unknown, " in text and again == text.replace(", commit unknown, ", ", commit abc, def, unknown, ")
    sys.argv[-1] = "3"
    with pytest.raises(SystemExit, match="other arguments"):
        mmdp.main()


def test_table_of_continuous_actions(command, tmp_path, monkeypatch, capsys):
    """Its own files, a column for each variant, and the estimates' noise; what can't be is refused before any run."""
    monkeypatch.setattr(mmdp, "N_SEEDS", {"continuous": 1})
    monkeypatch.setattr(mmdp, "SETTINGS", {"continuous": (("Pendulum-v1", 4, 0.2, ("suffix", "uniform")), ("MountainCarContinuous-v0", 3, 0.1, ("paper",)))})
    flags = {"table": "continuous", "bc_steps": 5, "policy_steps": 1, "eval_episodes": 4, "n_demos": 2}
    with pytest.raises(SystemExit, match="give at least 5, one for each action or bin"):
        command(**flags, rollouts_per_timestep=4)
    assert not (tmp_path / "runs").exists()
    command(**flags, rollouts_per_timestep=50)
    folder = tmp_path / "runs" / "results" / "theory"
    text = (folder / "mmdp_continuous.txt").read_text()
    assert {path.name for path in folder.iterdir()} == {"mmdp_continuous.txt", "mmdp_continuous.png"} and capsys.readouterr().out.endswith(text)
    assert text.startswith("python algos/mmdp.py --table continuous") and text.count("MMDP uniform") == 1 and text.count("50 bins") == 2


CASES = {
    "continuous": ({"env_id": "HalfCheetahBulletEnv-v0"}, "bins of one dimension"),
    "bins": ({"env_id": "Pendulum-v1", "n_bins": 1}, "--n-bins is 1: give at least 2"),
    "few bins": ({"env_id": "Pendulum-v1", "rollouts_per_timestep": 10, "n_bins": 11}, "give at least 11, one for each"),
    "tree": ({"env_id": "Tree-v0", "horizon": 20}, "--horizon 20"),
    "horizon": ({"horizon": 0}, "--horizon is 0"),
    "eps": ({"env_id": "Cliff-v0", "eps": 0.5}, "eps T is 0.5 * 50"),
    "tremble": ({"p_tremble": 1.5}, "--p-tremble is 1.5"),
    "few": ({"env_id": "MountainCar-v0", "rollouts_per_timestep": 2}, "give at least 3"),
    "rate": ({"learning_rate": 0}, "--learning-rate"),
    "demos": ({"demos": "nowhere.npz"}, "no such file"),
    "resume": ({"resume": "nowhere"}, "no args.json"),
    "both": ({"eval": "nowhere", "seed": 2}, "leave the others out"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_in_one_sentence(case, command, tmp_path):
    flags, words = CASES[case]
    with pytest.raises(SystemExit) as error:
        command(**flags)
    assert words in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_demonstrations_that_do_not_fit(command, tmp_path):
    env = make_env("CartPole-v1", horizon=6)
    demos = record(env, lambda o: 0, 3, "a test")
    save(tmp_path / "demos.npz", demos)
    with pytest.raises(SystemExit, match="horizon"):
        command(**QUICK | {"horizon": 5}, demos=tmp_path / "demos.npz")
    with pytest.raises(SystemExit, match="demonstration 0 was cut off after 6 steps: give --horizon at most that"):  # and did not end in a fall
        command(**QUICK | {"horizon": 7}, demos=tmp_path / "demos.npz")
    demos.states = None
    save(tmp_path / "stateless.npz", demos)
    with pytest.raises(SystemExit, match="no simulator states"):
        command(**QUICK, demos=tmp_path / "stateless.npz")
