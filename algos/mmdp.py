"""MMDP: moment matching by dynamic programming. One policy a timestep, backwards in time, each against a game on roll-outs from expert states.

Swamy, Choudhury, Bagnell and Wu, "Inverse Reinforcement Learning without Reinforcement Learning" (ICML 2023): Algorithm 3 (--variant primal: a reward a
timestep) and Algorithm 5 (--variant dual: a reward an outer iteration, and the uniform mixture of the policies). Read `train` at the end first: it is the
algorithm. On the paper's small MDPs the games are solved exactly; on classic control the policies are networks. Algorithm 5's D_t is emptied in each outer
iteration and holds roll-outs from s_t, t = T included; its pi_1, which nothing has taught, is what f first answers, and is left out of the mixture.

    python algos/mmdp.py                                                       CartPole, in seconds
    python algos/mmdp.py --env-id MountainCar-v0 --horizon 150 --payoff suffix
    python algos/mmdp.py --env-id Pendulum-v1                                  continuous actions, in bins
    python algos/mmdp.py --env-id Dante-v0 --horizon 10 --eps 0.02 --p-tremble 0 --negations
    python algos/mmdp.py --resume runs/RUN                                     go on with an interrupted run, to the same numbers
    python algos/mmdp.py --eval runs/RUN                                       score the saved policies
    python algos/mmdp.py --table discrete                                      the tables of runs/results/README.md (or continuous)

Signs: f(s, a) is a *reward*, high on the expert. Time: decisions t = 1..T, lists from 0. One interaction is one step of the environment; resets are free.
An episode that has ended stays in one absorbing state until T: so a fall or a reached goal is seen as often as it lasts.
Actions: 0..A-1; where they are continuous, numbers in [0, A): the box of one dimension is cut into A equal bins, the whole part of an action is its bin and the
fraction its place there. A policy gives each bin a probability and is uniform inside: a density, by which a uniform action can be weighted.
"""

import copy
import csv
import json
import math
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from scipy.optimize import linprog
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from utils.demos import load, record
from utils.envs import SMALL_MDPS, make_env, set_state

# ========================================================================================================================================== args


@dataclass
class Args:
    env_id: str = "CartPole-v1"
    """the task: CartPole-v1, MountainCar-v0, Acrobot-v1; Pendulum-v1, MountainCarContinuous-v0; Tree-v0, Cliff-v0 or Dante-v0"""
    seed: int = 1
    """seed of every random stream of the run"""
    demos: str = ""
    """demonstrations: an .npz file with states (default: recorded from the task's scripted expert, without trembling)"""
    n_demos: int = 25
    """demonstrations to train on, the first ones in the file"""
    p_tremble: float = 0.2
    """probability that the environment executes a uniformly random action instead of the policy's, in training and in evaluation"""
    horizon: int = 50
    """T, the number of decisions of an episode"""
    eval_episodes: int = 1000
    """episodes of an evaluation, from the environment's own start states"""
    torch_threads: int = 1
    """threads of this run; two runs of one thread each get more done on two cores than one run of two"""
    resume: str = ""
    """folder of an interrupted run to go on with; its own arguments are used"""
    eval: str = ""
    """folder of a run whose saved policies are scored; nothing is trained"""
    table: Literal["", "discrete", "continuous"] = ""
    """run classic control on 10 seeds (continuous: 5), print its table and draw it, into runs/results/theory; again: goes on where it stood"""

    # Small MDPs
    n_actions: int = 2
    """Tree: number of actions"""
    eps: float = 0.0
    """if above 0, the paper's policies are given, one of which errs with probability eps T: all of Cliff's, and all but Dante's first, which MMDP finds"""
    negations: bool = False
    """close the reward class of a small MDP under negation, as the paper assumes (classic control's always is)"""

    # The game
    variant: Literal["primal", "dual"] = "primal"
    """"primal": f answers each timestep's policy; "dual": f_i answers the mixture of all policies so far, and T policies answer f_i"""
    payoff: Literal["paper", "suffix"] = "paper"
    """what the learner's roll-outs are compared with: "paper", the expert's action and then the learner's policies; "suffix", the expert's recorded suffix"""
    rollouts_per_timestep: int = 100
    """M, roll-outs from expert states for each timestep"""
    first_actions: Literal["all", "uniform"] = "all"
    """"all" actions from each sampled state, under the same trembling, or one that is "uniform" and importance-weighted, as in the paper"""

    # Reward player
    n_features: int = 64
    """random Fourier features whose unit ball is the reward class on classic control"""
    iterations: int = 10
    """dual: outer iterations"""
    n_rollouts: int = 100
    """dual: whole trajectories of each new policy for the update of f"""
    regularization: float = 0.1
    """dual: strength of R(f)"""

    # Policy player
    n_bins: int = 5
    """continuous actions: number of bins, the A of the above"""
    deterministic: bool = True
    """networks act by their most probable action or bin, in roll-outs and in evaluation, rather than by sampling; the game is solved over all mixtures"""
    bc_steps: int = 1000
    """gradient steps of behavioural cloning, where the last policy starts"""
    policy_steps: int = 100
    """gradient steps for each timestep's policy"""
    learning_rate: float = 3e-3
    """Adam's; in behavioural cloning it decays linearly to 0"""


# ========================================================================================================================================= tasks
# A whole batch of states takes a step at once. tests/test_mmdp.py holds every function here to make_env's own steps.


def cartpole(states, actions):
    """(n, 4) float64, (n,) -> next states (n, 4), ended (n,). The equations of gymnasium's CartPole-v1, as those of the next two tasks."""
    x, x_dot, theta, theta_dot = states.T
    cos, sin = np.cos(theta), np.sin(theta)
    temp = (np.where(actions == 1, 10.0, -10.0) + 0.05 * np.square(theta_dot) * sin) / 1.1
    theta_acc = (9.8 * sin - cos * temp) / (0.5 * (4.0 / 3.0 - 0.1 * np.square(cos) / 1.1))
    x_acc = temp - 0.05 * theta_acc * cos / 1.1
    x, theta = x + 0.02 * x_dot, theta + 0.02 * theta_dot
    ended = (np.abs(x) > 2.4) | (np.abs(theta) > 12 * 2 * math.pi / 360)
    return np.stack([x, x_dot + 0.02 * x_acc, theta, theta_dot + 0.02 * theta_acc], axis=1), ended


def mountain_car(states, pushes, goal):
    position, velocity = states.T
    velocity = np.clip(velocity + pushes * 0.001 - np.cos(3 * position) * 0.0025, -0.07, 0.07)
    position = np.clip(position + velocity, -1.2, 0.6)
    velocity = np.where((position == -1.2) & (velocity < 0), 0.0, velocity)
    return np.stack([position, velocity], axis=1), (position >= goal) & (velocity >= 0)


def acrobot(states, actions):
    def derivative(s):
        t1, t2, v1, v2 = s.T
        d1 = 0.25 + (1 + 0.25 + np.cos(t2)) + 2
        d2 = 0.25 + 0.5 * np.cos(t2) + 1
        phi2 = 0.5 * 9.8 * np.cos(t1 + t2 - math.pi / 2)
        phi1 = -0.5 * v2**2 * np.sin(t2) - v2 * v1 * np.sin(t2) + 1.5 * 9.8 * np.cos(t1 - math.pi / 2) + phi2
        a2 = (actions - 1.0 + d2 / d1 * phi1 - 0.5 * v1**2 * np.sin(t2) - phi2) / (1.25 - d2**2 / d1)
        return np.stack([v1, v2, -(d2 * a2 + phi1) / d1, a2], axis=1)

    k1 = derivative(states)  # Runge-Kutta of order 4, one step of 0.2 s
    k2 = derivative(states + 0.1 * k1)
    k3 = derivative(states + 0.1 * k2)
    k4 = derivative(states + 0.2 * k3)
    angles, speeds = np.split(states + 0.2 / 6 * (k1 + 2 * k2 + 2 * k3 + k4), 2, axis=1)
    angles = np.where(np.abs(angles) > math.pi, (angles + math.pi) % (2 * math.pi) - math.pi, angles)
    limit = np.array([4 * math.pi, 9 * math.pi])
    return np.hstack([angles, np.clip(speeds, -limit, limit)]), -np.cos(angles[:, 0]) - np.cos(angles[:, 1] + angles[:, 0]) > 1.0


def acrobot_observations(states):
    t1, t2, v1, v2 = states.T
    return np.stack([np.cos(t1), np.sin(t1), np.cos(t2), np.sin(t2), v1, v2], axis=1)


def pendulum(states, torques):
    theta, theta_dot = states.T
    theta_dot = np.clip(theta_dot + (15 * np.sin(theta) + 3 * torques) * 0.05, -8, 8)
    return np.stack([theta + theta_dot * 0.05, theta_dot], axis=1), np.zeros(len(states), dtype=bool)


def pendulum_reward(states, torques):
    return -(np.square((states[:, 0] + math.pi) % (2 * math.pi) - math.pi) + 0.1 * np.square(states[:, 1]) + 0.001 * np.square(torques))


def pendulum_expert(observations):
    """Pumps energy up to that of standing upright, and balances there."""
    cos, sin, theta_dot = observations.T
    missing = 5 - 5 * cos - theta_dot**2 / 6
    return np.clip(np.where(cos > 0.9, -8 * np.arctan2(sin, cos) - 2 * theta_dot, 2 * missing * np.where(theta_dot < 0, -1, 1)), -2, 2)


def no_reward(states, actions):
    return np.zeros(len(states))


# task: (step, observation of the state, scripted expert: observations -> actions, reward of a step, reward of a step in the absorbing state)
CLASSIC_TASKS = {
    "CartPole-v1": (cartpole, lambda s: s, lambda o: (o @ [0.05, 0.15, 1.0, 0.35] > 0).astype(int), lambda s, a: np.ones(len(s)), 0.0),
    "MountainCar-v0": (lambda s, a: mountain_car(s, a - 1, 0.5), lambda s: s, lambda o: np.where(o[:, 1] < 0, 0, 2), no_reward, 1.0),
    "Acrobot-v1": (acrobot, acrobot_observations, lambda o: np.where(o[:, 5] < o[:, 4], 0, 2), no_reward, 1.0),
    "Pendulum-v1": (pendulum, lambda s: np.stack([np.cos(s[:, 0]), np.sin(s[:, 0]), s[:, 1]], axis=1), pendulum_expert, pendulum_reward, 0.0),
    "MountainCarContinuous-v0": (lambda s, a: mountain_car(s, 1.5 * a, 0.45), lambda s: s, lambda o: np.clip(100 * o[:, 1], -1, 1), no_reward, 1.0),
}


class Task:
    """The task of `args` on batches of states. Its return J: CartPole, steps up to the fall; MountainCars, Acrobot: steps at the goal; else the sum of r.

    step(states (n, d), actions (n,)) -> next states, ended (n,) bool; observe(states) -> float32 (n, obs_dim); reward(states, executed actions) -> (n,).
    """

    def __init__(self, args):
        self.env_id, self.T, self.small, self.seed = args.env_id, args.horizon, args.env_id in SMALL_MDPS, args.seed
        self.deterministic = args.deterministic
        self.kwargs = {"Tree-v0": {"n_actions": args.n_actions, "expert_seed": args.seed}}.get(args.env_id, {"eps": args.eps} if self.small else {})
        env = self.make_env()
        self.obs_dim, self.mdp, space = env.observation_space.shape[0], env.unwrapped, env.action_space
        self.continuous = space.shape == (1,)
        self.n_actions = args.n_bins if self.continuous else int(space.n)
        self.low, self.bin = (float(space.low[0]), float(space.high[0] - space.low[0]) / self.n_actions) if self.continuous else (0, 1)
        if self.small:
            self.step, self.absorbed_reward = lambda s, a: (self.mdp.move(s, a), np.zeros(len(s), dtype=bool)), 0.0
            self.reward, self._observe = self.mdp.reward, lambda s: s
            self.experts = [Table(np.eye(self.n_actions)[a]) for a in self.mdp.expert_actions]
            self.given = [self.mdp.given_policy(t) for t in range(1, self.T + 1)]
        else:
            step, self._observe, expert, reward, self.absorbed_reward = CLASSIC_TASKS[args.env_id]
            self.step, self.reward = lambda s, a: step(s, self.to_env(a)), lambda s, a: reward(s, self.to_env(a))
            self.experts = [Scripted(lambda o: self.from_env(expert(o)))] * self.T
            self.given = [None] * self.T

    def sequence(self, policy):
        """`policy` at every timestep, but for what a small MDP with eps > 0 prescribes."""
        return [policy if probabilities is None else Table(probabilities) for probabilities in self.given]

    def make_env(self, seed=0):
        return make_env(self.env_id, seed=seed, horizon=self.T, **self.kwargs)

    def to_env(self, actions):
        """Actions as the environment's own step takes them: torques or forces where they are continuous."""
        return self.low + self.bin * actions

    def from_env(self, actions):
        return np.clip((actions - self.low) / self.bin, 0, np.nextafter(self.n_actions, 0)) if self.continuous else actions

    def random_actions(self, size, rng):
        return rng.uniform(0, self.n_actions, size) if self.continuous else rng.integers(self.n_actions, size=size)

    def observe(self, states):
        return self._observe(states).astype(np.float32)

    def start_states(self, n, seed):
        """(n, d): n of the environment's own start states."""
        env = self.make_env(seed)
        return np.array([env.reset()[1] and env.unwrapped.state for _ in range(n)], dtype=np.float64)


# ================================================================================================================================ demonstrations


@dataclass
class Expert:
    """Demonstrations, E episodes of T decisions, held in the absorbing state after their end: `alive` (E, T). states (E, T, d) float64, actions (E, T)."""

    states: np.ndarray
    actions: np.ndarray
    alive: np.ndarray


def load_expert(args, task):
    """Expert from --demos, or from the scripted expert in the untrembling task. Raises ValueError where a file does not fit or has no states."""
    env = task.make_env((args.seed, 1))
    if args.demos:
        demos = load(args.demos, env, args.n_demos)
        demos.need_states(args.demos, "MMDP")
    else:

        def policy(observation):
            return task.to_env(choose(task, task.experts[env.t], observation[None], np.zeros(1))).reshape(env.action_space.shape)

        demos = record(env, policy, args.n_demos, "the task's scripted expert")
    states = np.array([set_state(env, state) is not None and env.unwrapped.state for state in demos.states], dtype=np.float64)
    for episode in np.flatnonzero((demos.lengths < task.T) & ~demos.terminated[demos.episode_starts[1:] - 1]):
        raise ValueError(f"{args.demos}: demonstration {episode} was cut off after {demos.lengths[episode]} steps: give --horizon at most that")
    shape = demos.n_episodes, task.T
    expert = Expert(np.zeros((*shape, states.shape[1])), np.zeros(shape, dtype=float if task.continuous else np.int64), np.zeros(shape, dtype=bool))
    for episode, (start, end) in enumerate(zip(demos.episode_starts[:-1], demos.episode_starts[1:])):
        rows = episode, slice(end - start)
        actions = task.from_env(demos.actions[start:end].reshape(end - start))
        expert.states[rows], expert.actions[rows], expert.alive[rows] = states[start:end], actions, True
    return expert


# ================================================================================================================================= reward player


class RewardClass:
    """F_r = {f = <w, phi(s, a)>}: w in the unit ball of random Fourier features, or a mixture of given rewards (with their negations).

    Classic control: the ball; phi of the standardised observation, the one-hot action (a continuous one itself, scaled to [-1, 1]) and a flag that the episode
    goes on, all zero in the absorbing state.
    Tree: one feature a leaf. Cliff, Dante: the true reward. Moments, the sums of phi over a (rest of a) trajectory, have shape (K,).
    """

    def __init__(self, args, task, expert):
        self.task, self.negations, self.strength = task, args.negations, args.regularization
        if task.small:
            self.K, self.absorbed = task.n_actions**task.T if args.env_id == "Tree-v0" else 1, 0.0
            return
        observations, rng = task.observe(expert.states[expert.alive]), np.random.default_rng((args.seed, 2))
        self.center, self.spread, self.K = observations.mean(0), observations.std(0) + 1e-6, args.n_features
        dim = task.obs_dim + (1 if task.continuous else task.n_actions) + 1
        self.frequencies, self.phases = rng.normal(size=(dim, self.K)) / math.sqrt(dim), rng.uniform(0, 2 * math.pi, self.K)
        self.absorbed = math.sqrt(2 / self.K) * np.cos(self.phases)

    def phi(self, states, actions):
        """(n, K)."""
        if not self.task.small:
            a = 2 * actions[:, None] / self.task.n_actions - 1 if self.task.continuous else np.eye(self.task.n_actions)[actions]
            z = [(self.task.observe(states) - self.center) / self.spread, a, np.ones((len(states), 1))]
            return math.sqrt(2 / self.K) * np.cos(np.hstack(z) @ self.frequencies + self.phases)
        if self.K == 1:
            return self.task.reward(states, actions)[:, None]
        leaves = self.task.mdp.move(states, actions) @ self.task.n_actions ** np.arange(self.task.T)  # below 0 for a path that has not come to its end
        return np.arange(self.K) == leaves[:, None]

    def no_regret(self, gap, i):
        """Follow the regularised leader after i policies: argmax_w <w, gap> + R(w), gap (K,) their mean gap to the expert.

        On the ball R = -strength/sqrt(i) |w|^2/2; for a mixture it is strength/sqrt(i) times the entropy of the weights.
        """
        strength = self.strength / math.sqrt(i)
        if not self.task.small:
            return gap / max(np.linalg.norm(gap), strength)
        gaps = np.concatenate([gap, -gap]) if self.negations else gap
        weights = np.exp((gaps - gaps.max()) / strength)
        weights /= weights.sum()
        return weights[: self.K] - weights[self.K :] if self.negations else weights


# ================================================================================================================================= policy player


class Network(nn.Module):
    """pi^t(a|s) of classic control: an MLP on standardised observations. It acts by its most probable action, or by sampling."""

    def __init__(self, center, spread, n_actions, deterministic, hidden=64):
        super().__init__()
        self.deterministic = deterministic
        self.register_buffer("center", torch.as_tensor(center, dtype=torch.float32))
        self.register_buffer("spread", torch.as_tensor(spread, dtype=torch.float32))
        self.net = nn.Sequential(nn.Linear(len(center), hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, n_actions))

    def forward(self, observations):
        return self.net((observations - self.center) / self.spread)  # logits

    def probabilities(self, observations):
        """Of acting: (n, obs_dim) float32 -> (n, A), both numpy."""
        with torch.no_grad():
            logits = self(torch.from_numpy(observations))
            return (F.one_hot(logits.argmax(1), logits.shape[1]) if self.deterministic else torch.softmax(logits, dim=1)).numpy()


class Table:
    """pi^t(a|s) of a small MDP: probabilities (S, A) at observations (S, obs_dim), and `default` (A,) everywhere else."""

    def __init__(self, default, observations=(), probabilities=()):
        self.default, self.observations, self.table = np.array(default, dtype=float), np.array(observations), np.array(probabilities)
        self.rows = {o.tobytes(): p for o, p in zip(self.observations, self.table)}

    def probabilities(self, observations):
        return np.array([self.rows.get(observation.tobytes(), self.default) for observation in observations])

    def state_dict(self):
        return {name: torch.from_numpy(x) for name, x in (("default", self.default), ("observations", self.observations), ("probabilities", self.table))}


class Scripted:
    """A deterministic policy, act: observations (n, obs_dim) -> actions (n,)."""

    def __init__(self, act):
        self.act = act


def choose(task, policy, observations, draws):
    """Actions (n,) from uniform `draws` (n,), by the inverse of the policy's distribution function: inside a bin too, where actions are continuous."""
    if isinstance(policy, Scripted):
        return policy.act(observations)
    probabilities = policy.probabilities(observations)
    cumulative = probabilities.cumsum(1)
    actions = np.minimum((cumulative <= draws[:, None]).sum(1), task.n_actions - 1)
    if not task.continuous:
        return actions
    mass, above = (x[np.arange(len(actions)), actions] for x in (probabilities, cumulative))
    return actions + np.clip(1 - (above - draws) / mass, 0, 1 - 1e-9)


def clone(policy, observations, actions, args, rng):
    """Behavioural cloning: cross-entropy on the demonstrations, in batches of 256."""
    observations, actions = torch.from_numpy(observations), torch.from_numpy(actions)
    optimizer = torch.optim.Adam(policy.parameters(), fused=True)
    for k in range(args.bc_steps):
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - k / args.bc_steps)
        batch = torch.randint(len(actions), (256,), generator=rng)
        loss = F.cross_entropy(policy(observations[batch]), actions[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ====================================================================================================================================== the game
# Eq. 1: pi^t <- argmin_pi max_{f in F_r} <f, g(pi)>, with g(pi) = (1/T) mean_i (target_i - sum_a pi(a|s_i) moments_{i,a}): g has shape (K,).


def per_action(results, observations, first_actions, n_actions, exact):
    """(n, A, K): the roll-outs' moments (n A or n, K) for each of n states and A first actions.

    Where only one uniform action was taken it is importance-weighted, and the others are 0: by A, or on a small MDP by n(s)/n(s, a), so that the sum over
    a state's samples is their number times the mean of those with a, E_{D_t|s, a}, and 0 for an action that was never tried.
    """
    n = len(observations)
    if len(results) > n:
        return results.reshape(n, n_actions, -1)
    moments, weights = np.zeros((n, n_actions, results.shape[1])), np.full(n, n_actions)
    if exact:
        same_state = (observations[:, None] == observations).all(2)
        weights = same_state.sum(1) / (same_state & (first_actions[:, None] == first_actions)).sum(1)
    moments[np.arange(n), first_actions] = weights[:, None] * results
    return moments


def solve(policy, observations, targets, moments, T, w, args):
    """Improve the network `policy` in place on the game, or for a given f = <w, phi> (dual). The best f of the ball is g/|g|, so that the payoff is |g|.

    observations (n, obs_dim), targets (n, K), moments (n, A, K), w (K,) or None. Returns the payoff after the last step.
    """
    observations, targets, moments = (torch.as_tensor(x, dtype=torch.float32) for x in (observations, targets / T, moments / T))
    w = None if w is None else torch.as_tensor(w, dtype=torch.float32)
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.learning_rate, fused=True)
    target = targets.mean(0)
    for k in range(args.policy_steps + 1):
        probabilities = torch.softmax(policy(observations), dim=1) / len(observations)
        g = target - probabilities.reshape(-1) @ moments.reshape(-1, len(target))
        payoff = g.norm() if w is None else w @ g
        if k < args.policy_steps:
            optimizer.zero_grad()
            payoff.backward()
            optimizer.step()
    return float(payoff.detach())


def solve_exactly(target, moments, negations, rng):
    """The same game by linear programming over all pi^t: minimise v so that v >= +-g_k(pi) for each k. Ties are broken at random.

    target (K,) and moments (S, A, K), already weighted by the share of each of the S states and by 1/T. Returns pi^t (S, A) and the payoff.
    """
    n_states, n_actions, _ = moments.shape
    columns = np.unique(np.vstack([target, moments.reshape(n_states * n_actions, -1)]), axis=1)  # many rewards of the tree's class see nothing
    c, B = columns[0], columns[1:]
    if negations:
        c, B = np.concatenate([c, -c]), np.hstack([B, -B])
    pi_sums = np.kron(np.eye(n_states), np.ones(n_actions))
    best = linprog(
        np.append(np.zeros(len(B)), 1), -np.hstack([B.T, np.ones((len(c), 1))]), -c,
        np.hstack([pi_sums, np.zeros((n_states, 1))]), np.ones(n_states), [(0, 1)] * len(B) + [(None, None)],
    )  # fmt: skip
    tied = linprog(rng.normal(size=len(B)), -B.T, best.fun + 1e-7 - c, pi_sums, np.ones(n_states), (0, 1))
    pi = np.where(tied.x < 1e-4, 0, tied.x).reshape(n_states, n_actions)
    return pi / pi.sum(1, keepdims=True), best.fun


def solve_table(observations, targets, moments, T, w, negations, rng):
    """`solve` for a small MDP: the table pi^t and its payoff. Averages over the samples of each state, then solves exactly; the dual's class is {w}."""
    if w is not None:
        targets, moments, negations = targets @ w[:, None], moments @ w[:, None], False
    states, index = np.unique(observations, axis=0, return_inverse=True)
    sums = np.zeros((len(states), *moments.shape[1:]))
    np.add.at(sums, index.reshape(-1), moments / (T * len(observations)))
    pi, payoff = solve_exactly(targets.mean(0) / T, sums, negations, rng)
    return Table(np.full(moments.shape[1], 1 / moments.shape[1]), states, pi), payoff


# ===================================================================================================================== roll-outs and evaluation


def draw_noise(n, length, args, task, rng):
    """All that is random in n roll-outs of `length` steps, three arrays (n, length): the draws that sample actions, which steps tremble, and to what."""
    return rng.random((n, length)), rng.random((n, length)) < args.p_tremble, task.random_actions((n, length), rng)


def roll_out(task, policies, states, t, noise, rewards=None, first_actions=None):
    """Follow policies[t - 1:], or first_actions (n,) and then policies[t:], from `states` (n, d) at t to the horizon, under `draw_noise`'s noise.

    Returns the moments (n, K) of the policies' own actions under `rewards`, a RewardClass (None: no moments), true returns (n,) and interactions.
    """
    n, alive, n_steps = len(states), np.arange(len(states)), 0
    draws, trembles, random_actions = noise
    moments, returns, ends = np.zeros((n, rewards.K if rewards else 0)), np.zeros(n), np.full(n, task.T)
    for tau in range(t, task.T + 1):
        if len(alive) == 0:
            break
        if tau == t and first_actions is not None:
            actions = first_actions
        else:
            actions = choose(task, policies[tau - 1], task.observe(states), draws[alive, tau - t])
        if rewards:
            moments[alive] += rewards.phi(states, actions)
        executed = np.where(trembles[alive, tau - t], random_actions[alive, tau - t], actions)
        returns[alive] += task.reward(states, executed)
        states, ended = task.step(states, executed)
        n_steps += len(alive)
        ends[alive[ended]] = tau
        states, alive = states[~ended], alive[~ended]
    if rewards:
        moments += (task.T - ends)[:, None] * rewards.absorbed
    return moments, returns + (task.T - ends) * task.absorbed_reward, n_steps


def expert_moments(task, rewards, expert):
    """(E, T, K): the sum of phi over each demonstration's recorded suffix, from each t on."""
    phi = np.broadcast_to(rewards.absorbed, (*expert.alive.shape, rewards.K)).astype(float)
    phi[expert.alive] = rewards.phi(expert.states[expert.alive], expert.actions[expert.alive])
    return phi[:, ::-1].cumsum(1)[:, ::-1]


def evaluate(args, task, sequences, seed):
    """True return J and its spread over `args.eval_episodes` episodes, of the uniform mixture of `sequences`: one of them acts for a whole episode.

    The start states and the noise depend on `seed` alone, so that policies scored with the same seed meet the same luck.
    """
    rng, n = np.random.default_rng(seed), args.eval_episodes
    states, noise = task.start_states(n, (*seed, 1)), draw_noise(n, task.T, args, task, rng)
    shares = zip(sequences, np.array_split(rng.permutation(n), len(sequences)))
    returns = np.concatenate([roll_out(task, policies, states[share], 1, [x[share] for x in noise])[1] for policies, share in shares])
    return {"return": float(returns.mean()), "return_std": float(returns.std())}


# ======================================================================================================================== logs, files and resuming


SECONDS_BETWEEN_CHECKPOINTS = 5


def save_policies(policies):
    """What a file holds of a sequence: a list of T tables, or each parameter of T networks in one tensor (T, ...), far faster to write than T small ones."""
    states = [policy.state_dict() for policy in policies]
    return states if isinstance(policies[0], Table) else {name: torch.stack([state[name] for state in states]) for name in states[0]}


def load_policies(task, saved):
    """The sequence of policies from its `save_policies`."""
    if task.small:
        return [Table(*(x.numpy() for x in state.values())) for state in saved]
    policies = [Network(saved["center"][0], saved["spread"][0], task.n_actions, task.deterministic) for _ in range(task.T)]
    for t, policy in enumerate(policies):
        policy.load_state_dict({name: value[t] for name, value in saved.items()})
    return policies


def save_atomically(path, content):
    """torch.save, to a temporary name first: a killed run leaves the old file or the new one, never half of one."""
    temporary = Path(f"{path}.tmp")
    torch.save(content, temporary)
    os.replace(temporary, path)


def write_atomically(path, text):
    """The same for text."""
    temporary = Path(f"{path}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def hold(folder):
    """An open file, whose lock keeps other processes from this run until it is closed or this process ends, in whatever way."""
    file = open(folder / "lock", "w")
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"another process is at {folder}: wait for its end, or stop it") from None
    except (ImportError, OSError):
        pass  # Windows, or a file system without locks
    return file


def describe_run(args):
    """Everything needed to run this again: the arguments, and what they ran on."""
    try:
        commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git here
        commit = ""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__, "commit": commit or "unknown"}
    gpu = f", {torch.cuda.get_device_name()}" if getattr(args, "device", "cpu") == "cuda" else ""
    return asdict(args) | {"exp_name": Path(__file__).stem, "versions": versions, "machine": f"{platform.machine()}, {os.cpu_count()} cores{gpu}"}


class Log:
    """One row a timestep, to metrics.csv and TensorBoard. The first `n_kept` rows of an earlier start are kept, later ones are written again."""

    def __init__(self, folder, n_kept):
        self.path = folder / "metrics.csv"
        self.path.touch()
        lines = self.path.read_bytes().splitlines(keepends=True)[: n_kept + 1] if n_kept else []
        os.truncate(self.path, sum(map(len, lines)))
        self.tensorboard = SummaryWriter(folder, purge_step=int(lines[-1].split(b",")[0]) + 1 if lines else 0)

    def write(self, row):
        with open(self.path, "a", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(row)
        for name, value in row.items():
            if value != "":
                self.tensorboard.add_scalar(name, value, row["charts/timesteps"])
        self.tensorboard.flush()

    def read(self, *names):
        """The columns `names` of the rows that have them, as floats."""
        with open(self.path, newline="") as file:
            rows = [[row[name] for name in names] for row in csv.DictReader(file)]
        return np.array([row for row in rows if "" not in row], dtype=float).reshape(-1, len(names)).T


def check_args(args):
    """Exit with one sentence about the first argument that can't be, before a folder is made or anything is trained."""
    if args.env_id not in (*CLASSIC_TASKS, *SMALL_MDPS):
        known = ", ".join((*CLASSIC_TASKS, *SMALL_MDPS))
        raise SystemExit(f"--env-id {args.env_id}: MMDP compares a few actions, or bins of one dimension, in a batched simulation: choose one of {known}")
    if not 0 <= args.p_tremble <= 1:
        raise SystemExit(f"--p-tremble is {args.p_tremble}: give a number from 0 to 1")
    if min(args.learning_rate, args.regularization) <= 0:
        raise SystemExit("--learning-rate and --regularization must be above 0")
    for field in fields(args):
        least = {"seed": 0, "bc_steps": 0, "policy_steps": 0, "n_bins": 2}.get(field.name, 1)
        if field.type is int and getattr(args, field.name) < least:
            raise SystemExit(f"--{field.name.replace('_', '-')} is {getattr(args, field.name)}: give at least {least}")
    if args.env_id == "Tree-v0" and args.n_actions**args.horizon > 2**14:
        raise SystemExit(f"--horizon {args.horizon}: the tree's reward class has n_actions^T members and 2^14 is the most here: see algos/tabular.py for more")
    try:
        task = Task(args)
        if args.first_actions == "all" and args.rollouts_per_timestep < task.n_actions:
            raise SystemExit(f"--rollouts-per-timestep is {args.rollouts_per_timestep}: give at least {task.n_actions}, one for each action or bin")
        load_expert(args, task)
    except ValueError as error:  # of the environment or of the demonstrations
        raise SystemExit(str(error)) from None


# ======================================================================================================================================= training


def behavioural_cloning(args, task, expert, rng):
    """The baseline, one policy for all timesteps: a network, where MMDP's last policy starts, or the table of the expert's actions."""
    observations, actions = task.observe(expert.states[expert.alive]), expert.actions[expert.alive].astype(np.int64)
    if task.small:
        policy = Table(np.full(task.n_actions, 1 / task.n_actions), observations, np.eye(task.n_actions)[actions])
    else:
        policy = Network(observations.mean(0), observations.std(0) + 1e-6, task.n_actions, task.deterministic)
        clone(policy, observations, actions, args, rng)
    return policy


def train(args, folder):
    """Algorithms 3 and 5. Writes logs, checkpoint and policies into `folder`, and goes on where a checkpoint stands."""
    # Every purpose has its own random stream, so that evaluating or logging never changes training.
    streams = [np.random.SeedSequence((args.seed, stream)) for stream in range(3, 8)]
    torch.manual_seed(int(streams[0].generate_state(1)[0]))  # initial weights
    clone_rng = torch.Generator().manual_seed(int(streams[1].generate_state(1)[0]))
    rngs = {name: np.random.default_rng(stream) for name, stream in zip(("reset", "noise", "tie"), streams[2:])}

    task = Task(args)
    T, A, M = task.T, task.n_actions, args.rollouts_per_timestep
    expert = load_expert(args, task)
    rewards = RewardClass(args, task, expert)
    suffixes = expert_moments(task, rewards, expert)
    bc = behavioural_cloning(args, task, expert, clone_rng)
    first = task.sequence(Table(np.full(A, 1 / A)) if task.small else bc)  # the dual's pi_1
    sequences, policies, gaps = [], task.sequence(bc), np.zeros(rewards.K)
    counts = {"iteration": 1, "t": T, "timesteps": 0, "rollout_timesteps": 0, "rows": 0, "seconds": 0.0}

    checkpoint, saved_at = folder / "checkpoint.pt", time.time()
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        sequences, policies = [load_policies(task, states) for states in saved["sequences"]], load_policies(task, saved["policies"])
        gaps, counts = saved["gaps"].numpy(), saved["counts"]
        for name, rng in rngs.items():
            rng.bit_generator.state = saved["rngs"][name]
    log = Log(folder, n_kept=counts["rows"])
    started = time.time() - counts["seconds"]
    n_iterations = args.iterations if args.variant == "dual" else 1
    progress = tqdm(total=n_iterations * T, initial=counts["rows"], unit="policy", disable=None)

    while counts["iteration"] <= n_iterations:
        i, t, w = counts["iteration"], counts["t"], None

        # ---- Dual: f_i answers the uniform mixture of pi_1:i, by a no-regret algorithm. Whole trajectories of pi_i from the start states.
        if args.variant == "dual":
            if t == T:
                states, noise = task.start_states(args.n_rollouts, (args.seed, 8, i)), draw_noise(args.n_rollouts, T, args, task, rngs["noise"])
                moments, _, n_steps = roll_out(task, sequences[-1] if sequences else first, states, 1, noise, rewards)
                gaps += (suffixes[:, 0].mean(0) - moments.mean(0)) / T
                counts["rollout_timesteps"] += n_steps
            w = rewards.no_regret(gaps / i, i)

        # ---- D_t: roll-outs from s_t ~ rho_E^t (of the demonstrations that have not ended), a first action each, then pi^{t+1:T}.
        episodes, payoff = np.flatnonzero(expert.alive[:, t - 1]), ""
        if len(episodes) and task.given[t - 1] is None:  # where every demonstration has ended no action matters, and BC's policy stays
            repeat = A if args.first_actions == "all" else 1
            episodes = rngs["reset"].choice(episodes, M // repeat)
            n, states, expert_actions = len(episodes), expert.states[episodes, t - 1], expert.actions[episodes, t - 1].astype(int)
            noise = [x.repeat(repeat, axis=0) for x in draw_noise(n, T - t + 1, args, task, rngs["noise"])]
            place = noise[0][:, 0] if task.continuous else 0  # in each bin: the draw that a given first action leaves unused
            first_actions = np.tile(np.arange(A), n) + place if repeat > 1 else task.random_actions(n, rngs["reset"])
            results, _, n_steps = roll_out(task, policies, states.repeat(repeat, axis=0), t, noise, rewards, first_actions)
            observations = task.observe(states)
            moments = per_action(results, observations, first_actions.astype(int), A, task.small)
            counts["timesteps"] += n_steps

            # ---- The game of Eq. 1, whose first term is the expert's action and then the learner's policies, or the expert's own suffix.
            targets = moments[np.arange(n), expert_actions] if args.payoff == "paper" else suffixes[episodes, t - 1]
            if task.small:
                policies[t - 1], payoff = solve_table(observations, targets, moments, T, w, rewards.negations, rngs["tie"])
            else:
                policies[t - 1] = copy.deepcopy(policies[min(t, T - 1)])  # a snapshot of pi^{t+1}, and of BC for the last
                payoff = solve(policies[t - 1], observations, targets, moments, T, w, args)

        counts |= {"t": t - 1, "rows": counts["rows"] + 1, "seconds": time.time() - started}
        evaluation = {"return": "", "return_std": ""}
        if t == 1:
            sequences, policies = [*sequences, policies], task.sequence(bc)
            counts |= {"iteration": i + 1, "t": T}
            evaluation = evaluate(args, task, sequences, (args.seed, 9))
            progress.write(f"{counts['timesteps']:>9} interactions  J {evaluation['return']:.2f} +- {evaluation['return_std']:.2f}")
        log.write(
            {"charts/timesteps": counts["timesteps"], "charts/all_timesteps": counts["timesteps"] + counts["rollout_timesteps"]}
            | {"charts/seconds": counts["seconds"], "game/iteration": i, "game/t": t, "game/payoff": payoff}
            | {f"eval/{name}": value for name, value in evaluation.items()}
        )
        progress.update()
        if time.time() - saved_at > SECONDS_BETWEEN_CHECKPOINTS or t == 1:
            save_atomically(
                checkpoint,
                {"sequences": [save_policies(s) for s in sequences], "policies": save_policies(policies), "gaps": torch.from_numpy(gaps)}
                | {"counts": counts, "rngs": {name: rng.bit_generator.state for name, rng in rngs.items()}},
            )
            saved_at = time.time()
    progress.close()
    log.tensorboard.close()
    save_atomically(folder / "policy.pt", {"sequences": [save_policies(s) for s in sequences], "bc": save_policies(task.sequence(bc)), "counts": counts})
    return report(args, folder)


def report(args, folder):
    """Score MMDP, BC and the scripted expert, on the same episodes, which training has not seen. Training ends with this too. Returns {name: J}."""
    if not (folder / "policy.pt").exists():
        raise SystemExit(f"{folder} has no policy.pt yet: it is saved when training ends: python algos/mmdp.py --resume {folder}")
    saved, task, scores = torch.load(folder / "policy.pt", weights_only=True), Task(args), {}
    mmdp, bc = [load_policies(task, states) for states in saved["sequences"]], load_policies(task, saved["bc"])
    for name, sequences in (("scripted expert", [task.experts]), ("BC", [bc]), (f"MMDP, {saved['counts']['timesteps']} interactions", mmdp)):
        score = evaluate(args, task, sequences, (args.seed, 10))
        scores[name.split(",")[0]] = score["return"]
        print(f"{name}: J {score['return']:.2f} +- {score['return_std']:.2f} over {args.eval_episodes} episodes, p_tremble {args.p_tremble:g}")
    return scores


# ========================================================================================================================= the tables of the results

N_SEEDS = {"discrete": 10, "continuous": 5}
VARIANTS = {"paper": {}, "suffix": {"payoff": "suffix"}, "uniform": {"first_actions": "uniform"}}
SETTINGS = {  # task, T, p_tremble, VARIANTS
    "discrete": [(*task, ("paper", "suffix")) for task in (("CartPole-v1", 50, 0.2), ("MountainCar-v0", 150, 0.1), ("MountainCar-v0", 150, 0.2))],
    "continuous": [("Pendulum-v1", 50, 0.1, ("paper", "uniform")), ("MountainCarContinuous-v0", 100, 0.1, ("paper", "suffix", "uniform"))],
}


def cost_of_bins(args, repeats=100):
    """Lines: J of the expert, redrawn in its bins; at t = T/2 the spread of M roll-outs' estimate of its E[sum f]/T, and how many of them count."""
    rng, t, M = np.random.default_rng((args.seed, 11)), args.horizon // 2, args.rollouts_per_timestep
    lines = [f"  The expert redrawn in its bins; the estimate at t = {t} of {M} roll-outs, first actions drawn in three ways: its spread (how many count)"]
    for A in (5, 10, 50):
        task = Task(replace(args, n_bins=A))
        expert, binned = load_expert(args, task), Scripted(lambda o, act=task.experts[0].act: np.floor(act(o)) + rng.random(len(o)))
        rewards, policies, spreads = RewardClass(args, task, expert), [binned] * task.T, []
        for how, repeat in (("from pi^t", 1), ("uniform, weighted", 1), ("each bin once", A)):
            episodes = rng.choice(np.flatnonzero(expert.alive[:, t - 1]), repeats * (M // repeat)).repeat(repeat)
            noise = [x.repeat(repeat, axis=0) for x in draw_noise(len(episodes) // repeat, task.T - t + 1, args, task, rng)]
            own, u = np.floor(expert.actions[episodes, t - 1]), noise[0][:, 0]
            actions = {"from pi^t": own + u, "uniform, weighted": A * u, "each bin once": np.arange(len(u)) % A + u}[how]
            w = np.where(how == "from pi^t", 1, A * (np.floor(actions) == own))
            moments = w[:, None] * roll_out(task, policies, expert.states[episodes, t - 1], t, noise, rewards, actions)[0] / task.T
            spread, count = math.sqrt(moments.reshape(repeats, -1, rewards.K).mean(1).var(0).sum()), len(w) / repeats * w.mean() ** 2 / (w**2).mean()
            spreads.append(f"{how} {spread:.3f} ({count:.0f})")
        J = evaluate(args, task, [policies], (args.seed, 10))["return"]
        lines.append(f"  {A:>2} bins: J {J:.2f}, {', '.join(spreads)}")
    return lines


def table(args):
    """Train on the SETTINGS of `args.table` with seeds from 1 (or go on with it); print and draw it, into runs/results/theory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    out = ROOT / "runs" / "results" / "theory" / {"discrete": "mmdp", "continuous": "mmdp_continuous"}[args.table]
    settings, n_seeds = SETTINGS[args.table], N_SEEDS[args.table]
    for env_id, T, p_tremble, _ in settings:
        check_args(replace(args, table="", env_id=env_id, horizon=T, p_tremble=p_tremble))
    commits = set()
    lines = [f"J: median [2.5 %, 97.5 %] of {n_seeds} seeds, of {args.eval_episodes} episodes each, and the least"]
    figure, axes = plt.subplots(1, len(settings), figsize=(4.2 * len(settings), 4), layout="constrained")
    for ax, (env_id, T, p_tremble, variants) in zip(axes, settings):
        columns = {}
        for variant in variants:
            for seed in range(1, n_seeds + 1):
                run = replace(args, table="", env_id=env_id, horizon=T, p_tremble=p_tremble, seed=seed, **VARIANTS[variant])
                folder = ROOT / "runs" / "mmdp_table" / f"{env_id}__{variant}__{p_tremble:g}__{seed}"
                if (folder / "args.json").exists() and saved_args(folder) != run:
                    raise SystemExit(f"{folder} holds a run with other arguments: move it away")
                scores = report(run, folder) if (folder / "policy.pt").exists() else start(run, folder)
                made = json.loads((folder / "args.json").read_text())
                commits |= {versions["commit"] for versions in (made["versions"], *made.get("resumed_with", []))}
                for name, J in scores.items():
                    columns.setdefault(f"MMDP {variant}" if name == "MMDP" else name, {})[seed] = J
        title = f"{env_id}, T = {T}, p_tremble {p_tremble:g}"
        lines.append(f"\n{title}")
        for k, (name, by_seed) in enumerate(columns.items()):
            J = np.array([*by_seed.values()])
            low, median, high = np.percentile(J, (2.5, 50, 97.5))
            above = f"  above BC on {sum(by_seed[seed] > columns['BC'][seed] for seed in by_seed)} seeds" if "MMDP" in name else ""
            lines.append(f"  {name:<16}{median:6.2f} [{low:.2f}, {high:.2f}]  least {J.min():.2f}{above}")
            ax.plot(k + np.linspace(-0.2, 0.2, len(J)), J, "o", color=f"C{k}", alpha=0.6, markersize=4)
            ax.plot([k - 0.3, k + 0.3], [median] * 2, color=f"C{k}", linewidth=2)
        ax.set(title=title.replace(", T", "\nT"), ylabel="J", xticks=range(len(columns)), xticklabels=[name.replace(" ", "\n") for name in columns])
        if args.table == "continuous":
            lines += cost_of_bins(replace(args, env_id=env_id, horizon=T, p_tremble=p_tremble))
    lines.insert(0, f"python algos/mmdp.py {' '.join(sys.argv[1:])}, commit {', '.join(sorted(commits))}, {describe_run(args)['machine']}")
    print("\n".join(lines))
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out.with_suffix(".png"), dpi=120)
    plt.close(figure)
    write_atomically(out.with_suffix(".txt"), "\n".join(lines) + "\n")


def saved_args(folder):
    saved = json.loads((folder / "args.json").read_text())
    if (script := saved.get("exp_name", "another script")) != Path(__file__).stem:
        raise SystemExit(f"{folder} was made by {script}, not by {Path(__file__).stem}: use the script that made it")
    if missing := [field.name for field in fields(Args) if field.name not in saved]:
        raise SystemExit(f"{folder} was made by a script without --{missing[0].replace('_', '-')}: use that version, commit {saved['versions']['commit']}")
    return Args(**{field.name: saved[field.name] for field in fields(Args)})


def start(args, folder):
    """Train in `folder`, new or begun: under its lock, and with args.json in it, to which a later start adds its versions where they are others."""
    folder.mkdir(parents=True, exist_ok=True)
    with hold(folder):
        path, made = folder / "args.json", describe_run(args)
        if path.exists():
            saved, versions = json.loads(path.read_text()), made["versions"]
            made = saved | ({} if versions == saved["versions"] else {"resumed_with": [*saved.get("resumed_with", []), versions]})
        write_atomically(path, json.dumps(made, indent=2))
        return train(args, folder)


def main():
    args = tyro.cli(Args)
    if args.resume or args.eval:
        folder, mode = (Path(args.resume), "resume") if args.resume else (Path(args.eval), "eval")
        if args != Args(**{mode: getattr(args, mode)}):
            raise SystemExit(f"--{mode} takes every other argument from the run: leave the others out")
        if not (folder / "args.json").exists():
            raise SystemExit(f"{folder} holds no args.json: name the folder of a run, such as runs/RUN")
        args = saved_args(folder)
    else:
        name = f"{args.env_id}__{Path(__file__).stem}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        mode, folder = "train", ROOT / "runs" / name.replace(":", "-").replace("/", "-")  # an id may be module:namespace/name
    if mode != "eval":  # which needs no demonstrations
        check_args(args)
    torch.set_num_threads(args.torch_threads)
    if mode == "eval":
        return report(args, folder)
    if args.demos and Path(args.demos).exists():
        args.demos = str(Path(args.demos).resolve())  # a run may be resumed from another folder
    try:
        table(args) if args.table else start(args, folder)
    except KeyboardInterrupt:
        again = " ".join(sys.argv) if args.table else f"{sys.argv[0]} --resume {folder}"
        raise SystemExit(f"interrupted; to go on: python {again}") from None


if __name__ == "__main__":
    main()
