"""FILTER(NR): inverse reinforcement learning with expert resets; the reward player is no-regret against all policies so far.

Swamy, Choudhury, Bagnell and Wu, "Inverse Reinforcement Learning without Reinforcement Learning" (ICML 2023): Algorithm 4, NRMM(NR), whose episodes start
from an expert state with probability alpha and from the environment's own start states otherwise. Read `train` at the end first: it is the algorithm.
Differs from filter_br.py only in what the reward player sees: the roll-outs of all policies so far, not of the current one.

Departures, with reasons in the README: the first action after a reset is the policy's, not a uniformly random one; the policy improves on the whole suffix
(the paper's own footnote on practice); a reset draws a demonstration and then one of its steps, not a time and then an expert state of that time; f takes
--disc-steps gradient steps an iteration; its payoff is a mean over state-action pairs, and the policy's reward is f shifted to --reward-level (the paper's:
--payoff sum, without a shift); rewards in the buffer are the present f's.

    python algos/filter_nr.py --env-id HopperBulletEnv-v0      train on the demonstrations that the repository ships
    python algos/filter_nr.py --demos FILE --env-id ...        train on your own (utils/demos.py describes the format)
    python algos/filter_nr.py --resume runs/RUN                go on with an interrupted run, to the same numbers
    python algos/filter_nr.py --eval runs/RUN                  score the saved policies

Signs: f(s, a) is a *reward*, high on the expert. The reward player raises L(pi, f) = E_expert[sum_t f] - E_pi[sum_t f], the policy player raises E_pi[sum_t f]
(here: a payoff of means and a discounted sum, see `moment_gap` and `reward_shift`).
"""

import copy
import csv
import importlib.util
import json
import math
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from gymnasium.wrappers import RecordVideo
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from utils.demos import ValidationError, load_split
from utils.envs import MAZE_ENVS, evaluate, make_env, roll_out, set_state

# ========================================================================================================================================== args


@dataclass
class Args:
    env_id: str = "HopperBulletEnv-v0"
    """the task"""
    seed: int = 1
    """seed of every random stream of the run"""
    demos: str = ""
    """demonstrations: an .npz or D4RL .hdf5 file, d4rl:ID or a Minari id (default: those shipped for the task)"""
    n_demos: int = 25
    """demonstrations to train on, the first ones in the file"""
    n_validation_demos: int = 5
    """demonstrations to select the returned policy by, the last ones in the file"""
    p_tremble: float | None = None
    """probability that the environment executes a uniformly random action instead of the policy's (0.1; mazes 0)"""
    horizon: int | None = None
    """steps of an episode in training, no fewer than a demonstration has (the task's own; mazes 700); evaluation has the task's own"""
    total_timesteps: int = 200_000
    """interactions used for policy optimisation (the paper's x-axis)"""
    eval_every: int = 5
    """outer iterations between evaluations"""
    eval_episodes: int | None = None
    """episodes of an evaluation, by the deterministic policy, from the environment's own start states (10; mazes 25)"""
    final_eval_episodes: int | None = None
    """the same for the scores at the end of the run, and for --eval (10; mazes 100)"""
    capture_video: bool = False
    """record the first episode of every evaluation (needs moviepy)"""
    device: Literal["cpu", "cuda"] = "cpu"
    """where networks and data are; environment and acting stay on the CPU"""
    torch_threads: int = 1
    """threads of this run; two runs of one thread each get more done on two cores than one run of two"""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """torch's float32 matrix products: "highest", or "medium" for bfloat16 products, faster on CPUs with AMX"""
    resume: str = ""
    """folder of an interrupted run to go on with; its own arguments are used"""
    eval: str = ""
    """folder of a run whose saved policies are scored; nothing is trained"""

    # The game
    iteration_timesteps: int = 5000
    """interactions of an outer iteration"""
    alpha: float | None = None
    """probability that an episode starts from an expert state: 0 is ordinary inverse RL, 1 is NRMM (0.5; mazes 1)"""
    anneal_alpha: bool = False
    """lower alpha linearly from 1 to 0 over the outer iterations, in place of a constant one"""

    # Reward player
    payoff: Literal["mean", "sum"] = "mean"
    """payoff: "mean" of f over state-action pairs, f then shifted to --reward-level, or "sum" over trajectories, f as it is (the paper's)"""
    reward_level: float | None = None
    """with --payoff mean: mean reward that f is shifted to on the expert, the end of an episode being worth 0 (0.5; mazes, where it is success, -0.1)"""
    rewards: Literal["recomputed", "recorded"] = "recomputed"
    """f of a transition in the buffer: "recomputed" with the present f, or "recorded" when the transition was collected"""
    n_rollouts: int = 4
    """whole trajectories of the current policy, as it explores, in an outer iteration, for all its gradient steps on f"""
    disc_steps: int = 10
    """gradient steps on f in an outer iteration"""
    disc_batch_size: int = 4096
    """state-action pairs of each side in a step on f"""
    disc_learning_rate: float | None = None
    """initial learning rate of f, decaying linearly to 0 over the outer iterations (2e-3; mazes 8e-4)"""
    gradient_penalty: float = 10.0
    """coefficient of the gradient penalty"""
    gradient_target: float = 0.4
    """norm that the penalty pulls f's gradient to"""

    # Policy player
    learner: Literal["auto", "sac", "td3_bc"] = "auto"
    """"sac", or "td3_bc", which learns from the demonstrations' transitions too ("auto": td3_bc in the mazes, sac elsewhere)"""
    buffer_size: int = 300_000
    """transitions in the replay buffer"""
    batch_size: int = 256
    """transitions in a gradient step"""
    gamma: float | None = None
    """discount factor (0.98; mazes 0.99)"""
    tau: float | None = None
    """rate at which the target networks follow (0.02; mazes 0.005)"""
    train_freq: int = 64
    """interactions between bursts of gradient steps"""
    gradient_steps: int = 64
    """gradient steps in a burst"""
    learning_rate: float | None = None
    """initial learning rate of policy, Q-functions and temperature, decaying linearly to 0 over the whole run (7.3e-4; mazes 3e-4)"""
    learning_starts: int | None = None
    """interactions with uniformly random actions, once, before learning starts (1000; mazes 0)"""
    gsde: bool = False
    """SAC: state-dependent exploration noise (the paper's table says so; here it learned far more slowly)"""
    init_temperature: float = 1.0
    """SAC: entropy temperature to start from"""
    standardize: bool | None = None
    """networks see observations in units of the demonstrations' spread (off, as PyBullet scales its own; mazes on)"""
    cloning_steps: int = 10_000
    """TD3+BC: gradient steps of behavioural cloning before anything else"""
    critic_warmup: int = 10_000
    """TD3+BC: gradient steps of the critic alone before the cloned policy follows it: a random critic undoes the cloning (0: the paper)"""
    q_weight: float = 2.5
    """TD3+BC: weight of Q against the pull to the expert's actions"""

    def __post_init__(self):
        """What is left out takes its value from DEFAULTS, where the mazes differ."""
        for name, (value, in_mazes) in DEFAULTS.items():
            if getattr(self, name) in (None, "auto"):
                setattr(self, name, in_mazes if self.env_id in MAZE_ENVS else value)


# Of flags whose default depends on the task: for all tasks but the mazes, and for them. From the paper's PyBullet and AntMaze settings; README: departures.
DEFAULTS = {
    "p_tremble": (0.1, 0.0),
    "horizon": (None, 700),
    "eval_episodes": (10, 25),
    "final_eval_episodes": (10, 100),
    "alpha": (0.5, 1.0),
    "reward_level": (0.5, -0.1),
    "disc_learning_rate": (2e-3, 8e-4),
    "standardize": (False, True),
    "learner": ("sac", "td3_bc"),
    "gamma": (0.98, 0.99),
    "tau": (0.02, 0.005),
    "learning_rate": (7.3e-4, 3e-4),
    "learning_starts": (1000, 0),
}


# ====================================================================================================================================== networks


def linear_init(n_in, *shape):
    """Uniform in +-1/sqrt(n_in), as torch initialises its linear layers."""
    return nn.Parameter(torch.empty(*shape).uniform_(-1 / math.sqrt(n_in), 1 / math.sqrt(n_in)))


class Standardize(nn.Module):
    """The first layer of every network, once fitted: observations in units of the demonstrations' spread, actions (behind them) as they are."""

    def __init__(self, dim):
        super().__init__()
        self.register_buffer("center", torch.zeros(dim))
        self.register_buffer("spread", torch.ones(dim))

    def fit(self, observations):
        """Take center and spread (at least 0.1) from the demonstrations' observations, (n, obs_dim)."""
        d = observations.shape[1]
        self.center[:d], self.spread[:d] = observations.mean(0), observations.std(0).clamp(min=0.1)

    def forward(self, x):
        return (x - self.center) / self.spread


class Actor(nn.Module):
    """A squashed Gaussian policy pi(a|s) = scale * tanh(u) + bias, u ~ N(mean(s), std(s)^2).

    With state-dependent exploration (gSDE, Raffin et al. 2021) the noise is a function of the state: u = mean(s) + h(s) E, where h is the last hidden layer
    and the matrix E ~ N(0, std^2) is drawn now and then instead of at every step: smooth motion instead of jitter. Its density is that of
    N(mean(s), h(s)^2 std^2).
    """

    def __init__(self, obs_dim, action_space, gsde=False, hidden=256):
        super().__init__()
        action_dim = action_space.shape[0]
        self.gsde = gsde
        self.standardize = Standardize(obs_dim)
        self.hidden = nn.Sequential(self.standardize, nn.Linear(obs_dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.mean = nn.Linear(hidden, action_dim)
        self.log_std = nn.Parameter(torch.full((hidden, action_dim), -3.0)) if gsde else nn.Linear(hidden, action_dim)
        self.register_buffer("scale", torch.as_tensor((action_space.high - action_space.low) / 2, dtype=torch.float32))
        self.register_buffer("bias", torch.as_tensor((action_space.high + action_space.low) / 2, dtype=torch.float32))

    def mean_of(self, h):
        return F.hardtanh(self.mean(h), -2.0, 2.0) if self.gsde else self.mean(h)  # with gSDE the mean stays where tanh is not yet flat

    def forward(self, observations):
        """The deterministic head, in the environment's units: what is evaluated and returned. (B, obs_dim) -> (B, action_dim)."""
        return self.scale * torch.tanh(self.mean_of(self.hidden(observations))) + self.bias

    def sample_noise(self, rng):
        """A noise matrix E (gSDE), (hidden, action_dim), held for several steps of acting."""
        return self.log_std.exp() * torch.randn(self.log_std.shape, generator=rng, device=self.log_std.device) if self.gsde else None

    def sample(self, observations, rng, noise=None):
        """Actions (B, action_dim) and the log-density (B,) of tanh(u), so in units of `scale`. Without `noise`, gSDE draws one for the batch."""
        h = self.hidden(observations)
        mean = self.mean_of(h)
        if self.gsde:
            h = h.detach()  # the noise must not shape the features
            deviation = h @ (self.sample_noise(rng) if noise is None else noise)
            variance = h.square() @ self.log_std.exp().square() + 1e-6
        else:
            variance = (2 * self.log_std(h).clamp(-20.0, 2.0)).exp()
            deviation = variance.sqrt() * torch.randn(mean.shape, generator=rng, device=mean.device)
        u = mean + deviation
        log_prob = -0.5 * (deviation.square() / variance + variance.log() + math.log(2 * math.pi))
        log_prob = log_prob - 2 * (math.log(2) - u - F.softplus(-2 * u))  # the density of tanh(u): minus log(1 - tanh(u)^2)
        return self.scale * torch.tanh(u) + self.bias, log_prob.sum(-1)


class DeterministicActor(nn.Module):
    """TD3's policy, scale * tanh(u(s)) + bias, which explores by Gaussian noise of standard deviation 0.1 * scale on its actions."""

    def __init__(self, obs_dim, action_space, hidden=256):
        super().__init__()
        self.standardize = Standardize(obs_dim)
        self.hidden = nn.Sequential(self.standardize, nn.Linear(obs_dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.mean = nn.Linear(hidden, action_space.shape[0])
        self.register_buffer("scale", torch.as_tensor((action_space.high - action_space.low) / 2, dtype=torch.float32))
        self.register_buffer("bias", torch.as_tensor((action_space.high + action_space.low) / 2, dtype=torch.float32))

    def forward(self, observations, noise=0.0):
        """(B, obs_dim) -> (B, action_dim), in the environment's units. `noise` (B, action_dim), in units of `scale`, is added, and the sum kept in range."""
        return self.scale * (torch.tanh(self.mean(self.hidden(observations))) + noise).clamp(-1, 1) + self.bias

    def sample_noise(self, rng):
        return None  # none is held over several steps

    def sample(self, observations, rng, noise=None):
        """Actions (B, action_dim) that explore. Their density is not needed."""
        return self(observations, 0.1 * torch.randn(len(observations), len(self.scale), generator=rng, device=self.scale.device)), None


class TwinQ(nn.Module):
    """Two independent Q-functions, evaluated together in batched matrix products. (B, obs_dim + action_dim) -> (2, B)."""

    def __init__(self, input_dim, hidden=256):
        super().__init__()
        self.standardize = Standardize(input_dim)
        self.w1, self.b1 = linear_init(input_dim, 2, input_dim, hidden), linear_init(input_dim, 2, 1, hidden)
        self.w2, self.b2 = linear_init(hidden, 2, hidden, hidden), linear_init(hidden, 2, 1, hidden)
        self.w3, self.b3 = linear_init(hidden, 2, hidden, 1), linear_init(hidden, 2, 1, 1)

    def forward(self, observation_actions):
        x = self.standardize(observation_actions).expand(2, -1, -1)
        x = torch.baddbmm(self.b1, x, self.w1).relu_()
        x = torch.baddbmm(self.b2, x, self.w2).relu_()
        return (x * self.w3.mT).sum(-1) + self.b3[..., 0]  # as a third batched product it would take four times as long


# ============================================================================================================================= optimistic Adam


def flatten(module):
    """Lay all parameters of `module`, and their gradients, in one vector each: an optimiser step is then a handful of operations, not a handful a layer."""
    parameters = list(module.parameters())
    vector = torch.cat([p.data.reshape(-1) for p in parameters])
    gradient = torch.zeros_like(vector)
    i = 0
    for p in parameters:
        p.data, p.grad = vector[i : i + p.numel()].view_as(p), gradient[i : i + p.numel()].view_as(p)
        i += p.numel()
    return vector, gradient


class OptimisticAdam:
    """Optimistic Adam (Daskalakis et al., "Training GANs with Optimism", 2018, Algorithm 1).

        w_{t+1} = w_t - 2 eta d_t + eta d_{t-1},    d_t = mhat_t / (sqrt(vhat_t) + eps)

    where mhat and vhat are Adam's averages, each with the bias correction of its own step, and d_0 = 0. Twice the present direction less the last one: a
    guess that the next gradient will differ from this one as this one did from the last. It damps the circling of the players of a zero-sum game
    (on min_x max_y xy, beta1 = 0 leads to within a few learning rates of the saddle; 0.9 circles away from it, though less than Adam).
    """

    def __init__(self, module, beta1=0.9, beta2=0.999, eps=1e-8):
        self.vector, self.gradient = flatten(module)
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.t = torch.zeros((), dtype=torch.float64) if self.vector.is_cuda else 0  # a number would stand still in a CUDA graph
        self.m, self.v, self.direction, self.last_direction = (torch.zeros_like(self.vector) for _ in range(4))

    @torch.no_grad()
    def step(self, learning_rate):
        """One step along the gradient that backward() left, which is then cleared. `learning_rate` is a number or a tensor of one."""
        torch.set_flush_denormal(True)  # averages of gradients that ended decay into denormal numbers: slow on a CPU, 17 to 28 % of an update late in a run
        self.t += 1
        learning_rate = torch.as_tensor(learning_rate)
        self.m.lerp_(self.gradient, 1 - self.beta1)
        self.v.mul_(self.beta2).addcmul_(self.gradient, self.gradient, value=1 - self.beta2)
        torch.sqrt(self.v, out=self.direction).div_((1 - self.beta2**self.t) ** 0.5).add_(self.eps)
        torch.div(self.m, self.direction, out=self.direction).div_(1 - self.beta1**self.t)
        self.vector.addcmul_(self.direction, learning_rate, value=-2).addcmul_(self.last_direction, learning_rate)
        self.last_direction.copy_(self.direction)
        self.gradient.zero_()
        torch.set_flush_denormal(False)  # as the simulator computes with them, and its results must not depend on ours

    def state_dict(self):
        return {"t": self.t, "m": self.m, "v": self.v, "last_direction": self.last_direction}

    def load_state_dict(self, state):
        self.t = state["t"]
        for name in ("m", "v", "last_direction"):
            getattr(self, name).copy_(state[name])


# ================================================================================================================================= reward player


class Reward(nn.Module):
    """The learned reward f(s, a) in [-1, 1], the paper's class F_r, high on the expert. (B, obs_dim + action_dim) -> (B,)."""

    def __init__(self, input_dim, hidden=256):
        super().__init__()
        self.standardize = Standardize(input_dim)
        self.net = nn.Sequential(self.standardize, nn.Linear(input_dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, observation_actions):
        return torch.tanh(self.net(observation_actions).squeeze(-1))


def moment_gap(f_expert, f_learner, expert_weight, learner_weight):
    """The payoff, from f on random state-action pairs of each side.

    With weights 1 it is the difference of f's means over pairs. With each side's mean episode length over T as its weight it is the paper's
    L(pi, f) / T = (E_expert[sum_t f] - E_pi[sum_t f]) / T, since a trajectory's sum over T is the mean over its pairs times its length over T.
    """
    return expert_weight * f_expert.mean() - learner_weight * f_learner.mean()


def gradient_penalty(f, expert_batch, learner_batch, target_norm, rng):
    """(|grad f| - target_norm)^2 on average over random mixtures of expert and learner pairs (Gulrajani et al. 2017), in standardised coordinates."""
    u = torch.rand(len(expert_batch), 1, generator=rng)
    mixture = (u * expert_batch + (1 - u) * learner_batch).requires_grad_()
    (gradient,) = torch.autograd.grad(f(mixture).sum(), mixture, create_graph=True)
    return ((gradient * f.standardize.spread).norm(dim=1) - target_norm).square().mean()


class Rollouts:
    """All roll-outs so far: state-action pairs in one preallocated block, (capacity, obs_dim + action_dim), so that an iteration copies its own rows only."""

    def __init__(self, capacity, sa_dim):
        self.block, self.n_pairs, self.n_episodes = torch.empty(capacity, sa_dim), 0, 0

    def add(self, episodes):
        for pairs in episodes:
            self.block[self.n_pairs : self.n_pairs + len(pairs)] = torch.as_tensor(pairs)
            self.n_pairs, self.n_episodes = self.n_pairs + len(pairs), self.n_episodes + 1

    @property
    def pairs(self):
        return self.block[: self.n_pairs]

    def state_dict(self):
        return {"pairs": self.pairs.clone(), "n_episodes": self.n_episodes}

    def load_state_dict(self, state):
        self.n_pairs, self.n_episodes = len(state["pairs"]), state["n_episodes"]
        self.pairs.copy_(state["pairs"])


def update_reward(f, optimizer, expert_pairs, learner_pairs, weights, learning_rate, args, rng):
    """The reward player's move: `args.disc_steps` steps up the payoff minus the penalty. Pairs are (n, obs_dim + action_dim). Returns what is logged."""
    for _ in range(args.disc_steps):
        expert_batch = expert_pairs[torch.randint(len(expert_pairs), (args.disc_batch_size,), generator=rng)]
        learner_batch = learner_pairs[torch.randint(len(learner_pairs), (args.disc_batch_size,), generator=rng)]
        f_expert, f_learner = f(expert_batch), f(learner_batch)
        gap = moment_gap(f_expert, f_learner, *weights)
        penalty = gradient_penalty(f, expert_batch, learner_batch, args.gradient_target, rng)
        (args.gradient_penalty * penalty - gap).backward()
        optimizer.step(learning_rate)
    logs = {"gap": gap, "penalty": penalty, "f_expert": f_expert.mean(), "f_expert_std": f_expert.std()}
    return {name: value.detach() for name, value in (logs | {"f_learner": f_learner.mean(), "f_learner_std": f_learner.std()}).items()}


# ================================================================================================================================= policy player


class ReplayBuffer:
    """A ring of transitions in one preallocated float32 matrix: (s, a | s', terminated, reward). `terminated` is never set by the horizon."""

    def __init__(self, capacity, obs_dim, action_dim):
        self.numpy_rows = np.zeros((capacity, 2 * obs_dim + action_dim + 2), np.float32)  # `add` writes here, in a third of the time that torch would take
        self.rows = torch.as_tensor(self.numpy_rows)  # on the CPU the same memory, on a GPU a copy that `label` keeps up to date
        self.obs_dim, self.sa_dim = obs_dim, obs_dim + action_dim
        self.n_added, self.n_labelled = 0, 0

    def __len__(self):
        return min(self.n_added, len(self.rows))

    def add(self, observation, action, next_observation, terminated, reward=0.0):
        row = self.numpy_rows[self.n_added % len(self.rows)]
        row[: self.obs_dim] = observation
        row[self.obs_dim : self.sa_dim] = action
        row[self.sa_dim : -2] = next_observation
        row[-2], row[-1] = terminated, reward
        self.n_added += 1

    def sample(self, n_batches, batch_size, rng):
        """`n_batches` independent uniform batches, with one look-up for all of them."""
        return self.rows[torch.randint(len(self), (n_batches * batch_size,), generator=rng)].split(batch_size)

    def state_dict(self):
        return {"rows": self.rows[: len(self)].clone(), "n_added": self.n_added, "n_labelled": self.n_labelled}

    def load_state_dict(self, state):
        self.rows[: len(state["rows"])] = state["rows"]
        self.numpy_rows[: len(state["rows"])] = state["rows"].cpu()
        self.n_added, self.n_labelled = state["n_added"], state["n_labelled"]


class SAC:
    """Soft Actor-Critic (Haarnoja et al. 2018): twin Q-functions, entropy temperature tuned to the target entropy -dim(A), optimistic Adam throughout."""

    def __init__(self, obs_dim, action_space, gamma, tau, gsde, init_temperature, rng):
        self.gamma, self.tau, self.obs_dim, self.rng = gamma, tau, obs_dim, rng
        self.sa_dim = obs_dim + action_space.shape[0]
        self.actor = Actor(obs_dim, action_space, gsde)
        self.critic, self.target_critic = TwinQ(self.sa_dim), TwinQ(self.sa_dim)
        self.networks = self.actor, self.critic, self.target_critic
        self.log_temperature = nn.ParameterList([nn.Parameter(torch.tensor(math.log(init_temperature)))])  # a module: OptimisticAdam takes one
        self.target_entropy = -float(action_space.shape[0])
        self.actor_parameters = list(self.actor.parameters())
        self.actor_optimizer, self.critic_optimizer = OptimisticAdam(self.actor), OptimisticAdam(self.critic)
        self.temperature_optimizer = OptimisticAdam(self.log_temperature)
        self.target_vector, _ = flatten(self.target_critic)
        self.target_vector.copy_(self.critic_optimizer.vector)

    def target(self, next_observations, terminated, rewards):
        """r + gamma (1 - terminated) (min_k Q_k(s', a') - temperature log pi(a'|s')), a' ~ pi(.|s'): (B,). Truncation bootstraps, termination does not."""
        next_actions, log_prob = self.actor.sample(next_observations, self.rng)
        next_q = self.target_critic(torch.cat([next_observations, next_actions], 1)).amin(0)
        return rewards + self.gamma * (1 - terminated) * (next_q - self.log_temperature[0].exp() * log_prob)

    def update(self, batch, learning_rate):
        """One gradient step of critic, actor and temperature on `batch` (rows of the replay buffer). Returns what is logged, as tensors."""
        observations = batch[:, : self.obs_dim]
        with torch.no_grad():
            target = self.target(batch[:, self.sa_dim : -2], batch[:, -2], batch[:, -1])
        q = self.critic(batch[:, : self.sa_dim])
        critic_loss = (q - target).square().mean()
        critic_loss.backward()
        self.critic_optimizer.step(learning_rate)

        actions, log_prob = self.actor.sample(observations, self.rng)
        temperature = self.log_temperature[0].detach().exp()
        actor_loss = (temperature * log_prob - self.critic(torch.cat([observations, actions], 1)).amin(0)).mean()
        actor_loss.backward(inputs=self.actor_parameters)
        self.actor_optimizer.step(learning_rate)

        # The temperature rises while the entropy is below its target: gradient of -log_temperature (log pi + target_entropy).
        self.temperature_optimizer.gradient.copy_(-(log_prob.detach().mean() + self.target_entropy))
        self.temperature_optimizer.step(learning_rate)

        with torch.no_grad():
            self.target_vector.lerp_(self.critic_optimizer.vector, self.tau)
        logs = {"critic_loss": critic_loss, "actor_loss": actor_loss, "q": q.mean(), "entropy": -log_prob.mean(), "temperature": temperature}
        return {name: value.detach() for name, value in logs.items()}

    def state_dict(self):
        names = ("actor", "critic", "target_critic", "log_temperature", "actor_optimizer", "critic_optimizer", "temperature_optimizer")
        return {name: getattr(self, name).state_dict() for name in names}

    def load_state_dict(self, state):
        for name, value in state.items():
            getattr(self, name).load_state_dict(value)


class GraphedUpdate:
    """SAC's update as one CUDA graph: on a GPU, launching its some 200 small operations one by one takes far longer than computing them."""

    def __init__(self, agent):
        self.agent, self.graph, self.n_eager = agent, None, 3

    def __call__(self, batch, learning_rate):
        if self.n_eager:  # while CUDA's libraries set themselves up
            self.n_eager -= 1
            return self.agent.update(batch, learning_rate)
        if self.graph is None:
            self.batch, self.learning_rate, self.graph = batch.clone(), learning_rate.clone(), torch.cuda.CUDAGraph()
            self.graph.register_generator_state(self.agent.rng)
            with torch.cuda.graph(self.graph):  # which only records: what it reads and writes has its place in memory from now on
                self.logs = self.agent.update(self.batch, self.learning_rate)
        self.batch.copy_(batch)
        self.learning_rate.copy_(learning_rate)
        self.graph.replay()
        return self.logs


class TD3BC:
    """TD3+BC (Fujimoto and Gu 2021) on two sources of transitions, as in the paper's AntMaze experiments.

    A batch comes from the learner's buffer or, with probability 1/2, from the demonstrations. There the policy is pulled to the expert's actions too:

        minimise -q_weight mean Q(s, pi(s)) / mean |Q(s, pi(s))|  (+ mean (pi(s) - a)^2, in units of `scale`, on the demonstrations)
    """

    def __init__(self, obs_dim, action_space, gamma, tau, critic_warmup, q_weight, expert_buffer, rng):
        self.gamma, self.tau, self.critic_warmup, self.q_weight = gamma, tau, critic_warmup, q_weight
        self.obs_dim, self.rng, self.expert_buffer = obs_dim, rng, expert_buffer
        self.sa_dim = obs_dim + action_space.shape[0]
        self.actor, self.target_actor = DeterministicActor(obs_dim, action_space), DeterministicActor(obs_dim, action_space)
        self.critic, self.target_critic = TwinQ(self.sa_dim), TwinQ(self.sa_dim)
        self.networks = self.actor, self.target_actor, self.critic, self.target_critic
        self.actor_parameters = list(self.actor.parameters())
        self.actor_optimizer, self.critic_optimizer = OptimisticAdam(self.actor), OptimisticAdam(self.critic)
        self.target_actor_vector, self.target_vector = flatten(self.target_actor)[0], flatten(self.target_critic)[0]
        self.target_actor_vector.copy_(self.actor_optimizer.vector)
        self.target_vector.copy_(self.critic_optimizer.vector)

    def cloning_loss(self, batch, actions):
        """Mean squared distance of `actions` to the batch's, in units of the actor's `scale`, half the action range."""
        return ((actions - batch[:, self.obs_dim : self.sa_dim]) / self.actor.scale).square().mean()

    def clone(self, n_steps, batch_size, learning_rate):
        """Behavioural cloning, before the game."""
        for _ in range(n_steps):
            (batch,) = self.expert_buffer.sample(1, batch_size, self.rng)
            self.cloning_loss(batch, self.actor(batch[:, : self.obs_dim])).backward()
            self.actor_optimizer.step(learning_rate)
        self.target_actor_vector.copy_(self.actor_optimizer.vector)

    def target(self, next_observations, terminated, rewards):
        """r + gamma (1 - terminated) min_k Q'_k(s', pi'(s') + noise): (B,), with target networks, and the noise of standard deviation 0.2 kept within 0.5."""
        noise = (0.2 * torch.randn(len(rewards), self.sa_dim - self.obs_dim, generator=self.rng)).clamp(-0.5, 0.5)
        next_actions = self.target_actor(next_observations, noise)
        return rewards + self.gamma * (1 - terminated) * self.target_critic(torch.cat([next_observations, next_actions], 1)).amin(0)

    def update(self, batch, learning_rate):
        """One gradient step of the critic on `batch` or, with probability 1/2, on as many of the demonstrations; every second time also of the warm actor."""
        is_expert = torch.rand((), generator=self.rng) < 0.5
        if is_expert:
            (batch,) = self.expert_buffer.sample(1, len(batch), self.rng)
        observations = batch[:, : self.obs_dim]
        with torch.no_grad():
            target = self.target(batch[:, self.sa_dim : -2], batch[:, -2], batch[:, -1])
        q = self.critic(batch[:, : self.sa_dim])
        critic_loss = (q - target).square().mean()
        critic_loss.backward()
        self.critic_optimizer.step(learning_rate)
        logs = {"critic_loss": critic_loss, "q": q.mean()}

        if self.critic_optimizer.t % 2 == 0 and self.critic_optimizer.t > self.critic_warmup:
            actions = self.actor(observations)
            value = self.critic(torch.cat([observations, actions], 1))[0]
            actor_loss = -self.q_weight * value.mean() / value.abs().mean().detach()
            if is_expert:
                actor_loss = actor_loss + self.cloning_loss(batch, actions)
            actor_loss.backward(inputs=self.actor_parameters)
            self.actor_optimizer.step(learning_rate)
            logs["actor_loss"] = actor_loss
        if self.critic_optimizer.t % 2 == 0:
            with torch.no_grad():
                self.target_vector.lerp_(self.critic_optimizer.vector, self.tau)
                self.target_actor_vector.lerp_(self.actor_optimizer.vector, self.tau)
        return {name: value.detach() for name, value in logs.items()}

    def state_dict(self):
        names = ("actor", "target_actor", "critic", "target_critic", "actor_optimizer", "critic_optimizer")
        return {name: getattr(self, name).state_dict() for name in names}

    def load_state_dict(self, state):
        for name, value in state.items():
            getattr(self, name).load_state_dict(value)


def expert_transitions(demos):
    """A ReplayBuffer of all transitions of the demonstrations, for TD3+BC."""
    buffer = ReplayBuffer(len(demos.actions), demos.observations.shape[1], demos.actions.shape[1])
    for row in zip(demos.observations, demos.actions, demos.next_observations, demos.terminated, strict=True):
        buffer.add(*row)
    buffer.rows.copy_(torch.as_tensor(buffer.numpy_rows))  # for a GPU: cloning comes before `label`
    return buffer


@torch.no_grad()
def reward_shift(f, expert_pairs, args):
    """What is added to f to make the policy player's reward: a number that puts the expert's mean reward at `args.reward_level`.

    The mean payoff does not depend on it, but the policy does: the end of an episode is worth 0, so ending it pays wherever f plus this is below 0. Left to
    itself f's level drifts, and Hopper learns to fall at once, or to stand still for ever.
    """
    return args.reward_level - f(expert_pairs).mean().item() if args.payoff == "mean" else 0.0


@torch.no_grad()
def label(buffer, f, shift):
    """Give the transitions that have none their learned reward, in batches that fit a cache: far cheaper than f on every batch of every update."""
    oldest = max(buffer.n_labelled, buffer.n_added - len(buffer))
    for rows in torch.arange(oldest, buffer.n_added, device="cpu").remainder(len(buffer.rows)).split(1024):
        if buffer.rows.device.type != "cpu":  # see ReplayBuffer
            buffer.rows[rows] = torch.as_tensor(buffer.numpy_rows[rows.numpy()])
        buffer.rows[rows, -1] = f(buffer.rows[rows, : buffer.sa_dim]) + shift
    buffer.n_labelled = buffer.n_added


# ================================================================================================================================= expert resets


def start_episode(env, demos, alpha, rng):
    """With probability alpha put `env` into an expert's state (a demonstration, then one of its steps, both uniformly), else into one of its own start states.

    Returns the observation and whether it was an expert reset. A reset takes no simulation step; the episode has the rest of the horizon left.
    """
    if rng.random() >= alpha:
        return env.reset()[0], False
    episode = rng.integers(demos.n_episodes)
    row = rng.integers(demos.episode_starts[episode], demos.episode_starts[episode + 1])
    return set_state(env, demos.states[row]), True


# =============================================================================================================== acting, evaluation and selection


def on_cpu(actor):
    """`actor` itself or, from a GPU, a copy: for one state after the other a core is faster."""
    return actor if actor.scale.device.type == "cpu" else copy.deepcopy(actor).cpu()


def deterministic(actor):
    """The policy that is evaluated and returned: observation -> action."""
    actor = on_cpu(actor)

    def act(observation):
        with torch.no_grad():
            return actor(torch.from_numpy(observation)[None])[0].numpy()

    return act


def sampler(actor, rng, hold):
    """The policy that explores: observation -> action ~ pi(.|s). With gSDE its noise matrix is held for `hold` steps."""
    actor, noise, t = on_cpu(actor), None, 0

    def act(observation):
        nonlocal noise, t
        with torch.no_grad():
            if t % hold == 0:
                noise = actor.sample_noise(rng)
            t += 1
            return actor.sample(torch.from_numpy(observation)[None], rng, noise)[0][0].numpy()

    return act


def evaluate_and_select(args, folder, actor, step, validation_error, counts):
    """Evaluate the present policy and save it: as final_policy.pt, and as policy.pt where it has the least validation error so far.

    The true reward has no part in the selection. Returns what `evaluate` did, and the console's line.
    """
    env = make_env(args.env_id, p_tremble=args.p_tremble, seed=(args.seed, 10, step), render_mode="rgb_array" if args.capture_video else None)
    if args.capture_video:
        env = RecordVideo(env, str(folder / "videos"), episode_trigger=lambda episode: episode == 0, name_prefix=f"timestep-{step}", disable_logger=True)
    evaluation = evaluate(env, deterministic(actor), args.eval_episodes, validation_error)
    policy = {"actor": actor.state_dict(), "step": step, "evaluation": evaluation}
    save_atomically(folder / "final_policy.pt", policy)
    selected = evaluation["validation_error"] <= counts["best_error"]
    if selected:
        counts["best_error"] = evaluation["validation_error"]
        save_atomically(folder / "policy.pt", policy)
    line = f"{step:>8} {X_AXIS[2]}  return {evaluation['return']:7.1f} +- {evaluation['return_std']:<6.1f} length {evaluation['length']:6.1f}"
    return evaluation, f"{line}  validation error {evaluation['validation_error']:.4f}{' *' if selected else '  '}"


# ======================================================================================================================== logs, files and resuming


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


class Generators:
    """The run's random streams, torch's and numpy's, for its checkpoint."""

    def __init__(self, *rngs):
        self.rngs = dict.fromkeys(rngs)  # once each: on the CPU one of them acts and trains

    def state_dict(self):
        return {"states": [rng.get_state() if isinstance(rng, torch.Generator) else rng.bit_generator.state for rng in self.rngs]}

    def load_state_dict(self, state):
        for rng, value in zip(self.rngs, state["states"], strict=True):
            if isinstance(rng, torch.Generator):
                rng.set_state(value.cpu())
            else:
                rng.bit_generator.state = value


def describe_run(args):
    """Everything needed to run this again: the arguments, and what they ran on."""
    try:
        commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git here
        commit = ""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__, "commit": commit or "unknown"}
    gpu = f", {torch.cuda.get_device_name()}" if getattr(args, "device", "cpu") == "cuda" else ""
    return asdict(args) | {"exp_name": Path(__file__).stem, "versions": versions, "machine": f"{platform.machine()}, {os.cpu_count()} cores{gpu}"}


X_AXIS = ("charts/timesteps", "interactions used for policy optimisation", "interactions")  # the first column of metrics.csv, in words, in a word


class Log:
    """One row an outer iteration, to metrics.csv and TensorBoard. The first `n_kept` rows of an earlier start are kept, later ones are written again."""

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
                self.tensorboard.add_scalar(name, value, row[X_AXIS[0]])
        self.tensorboard.flush()


def plot_learning_curve(folder, references):
    """learning_curve.png: the true return over the x-axis, beside the references."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with open(folder / "metrics.csv", newline="") as file:
        points = [(int(row[X_AXIS[0]]), float(row["eval/return"])) for row in csv.DictReader(file) if row["eval/return"]]
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(*zip(*points, strict=True), "o-", label="policy")
    for (name, value), style in zip(references.items(), ("--", ":", "-."), strict=False):
        axes.axhline(value, color="black", linestyle=style, label=name)
    axes.set(xlabel=X_AXIS[1], ylabel="true return")
    axes.set_title(folder.name, fontsize="small")
    axes.legend()
    figure.savefig(folder / "learning_curve.png", dpi=120)
    plt.close(figure)


def check_args(args):
    """Exit with one sentence about the first argument that can't be, before a folder is made or anything is trained."""
    for field in fields(args):  # in one loop, as not every script has every flag
        value, flag = getattr(args, field.name), f"--{field.name.replace('_', '-')}"
        if field.name in ("alpha", "p_tremble", "gamma", "tau") and not 0 <= value <= 1:
            raise SystemExit(f"{flag} is {value}: give a number from 0 to 1")
        if isinstance(value, float) and not math.isfinite(value):
            raise SystemExit(f"{flag} is {value}: give a finite number")
        if field.name.endswith(("learning_rate", "q_weight", "gradient_penalty", "gradient_target")) and value < 0:
            raise SystemExit(f"{flag} is {value}: give at least 0")
        if field.name == "init_temperature" and value <= 0:
            raise SystemExit(f"{flag} is {value}: give a number above 0")
        if field.name == "gsde" and value and args.learner == "td3_bc":
            raise SystemExit(f"{flag} is SAC's way to explore, and TD3+BC has its own: leave it out, or add --learner sac")
        if field.name == "learning_starts" or (field.name == "critic_warmup" and args.learner == "td3_bc"):
            n_bursts = (args.total_timesteps - 1) // args.train_freq - args.learning_starts // args.train_freq  # the rate of a last one would be 0
            if n_bursts * args.gradient_steps <= (value if field.name == "critic_warmup" else 0):
                raise SystemExit(f"{flag} is {value}, and the run ends before the policy may learn: give fewer, or a longer --total-timesteps")
        least = 0 if field.name in ("seed", "learning_starts", "cloning_steps", "critic_warmup") else 1
        if field.type in (int, int | None) and value is not None and value < least:
            raise SystemExit(f"{flag} is {value}: give at least {least}")
    try:
        torch.empty(1, device=args.device)
    except (RuntimeError, AssertionError):  # the second from a torch without CUDA
        raise SystemExit(f"--device is {args.device}, which torch does not find here: give cpu, or cuda on a machine with such a GPU") from None
    if args.capture_video and importlib.util.find_spec("moviepy") is None:
        raise SystemExit("--capture-video needs a package that is not installed: pip install moviepy")
    try:
        env = make_env(args.env_id, p_tremble=args.p_tremble, horizon=getattr(args, "horizon", None))  # BC has none
        if not hasattr(env.action_space, "high"):
            raise SystemExit(f"--env-id {args.env_id} has discrete actions, and this script needs continuous ones: choose another task")
        demos, _, _ = load_split(args.demos, env, args.n_demos, args.n_validation_demos, make_env(args.env_id, p_tremble=args.p_tremble))
        if args.anneal_alpha or args.alpha > 0:
            demos.need_states(args.demos or args.env_id, "--anneal-alpha" if args.anneal_alpha else f"--alpha {args.alpha}")
    except ValueError as error:  # of the environment or of the demonstrations
        raise SystemExit(str(error)) from None
    if args.capture_video:
        try:
            env = make_env(args.env_id, render_mode="rgb_array")
            env.reset()
            env.render()
        except Exception as error:  # whatever the task's way to draw raises
            raise SystemExit(f"--capture-video: {args.env_id} can't be drawn here ({error}); MuJoCo's tasks may need MUJOCO_GL=egl or osmesa") from None


# ======================================================================================================================================= training


def train(args, folder):
    """Algorithm 4 with expert resets of probability alpha. Writes logs, checkpoint and policies into `folder`, and goes on where a checkpoint stands."""
    # Random streams are numbered (seed, k): 1 to 7 belong to training. Those of evaluating and logging come after, so that they never change training.
    streams = [np.random.SeedSequence((args.seed, stream)) for stream in range(1, 6)]
    torch.manual_seed(int(streams[0].generate_state(1)[0]))  # initial weights
    policy_rng, reward_rng = (torch.Generator(args.device).manual_seed(int(stream.generate_state(1)[0])) for stream in streams[1:3])
    acting_rng = policy_rng if args.device == "cpu" else torch.Generator("cpu").manual_seed(int(streams[1].generate_state(2)[1]))  # see on_cpu
    reset_rng, warmup_rng = (np.random.default_rng(stream) for stream in streams[3:5])
    env, rollout_env = (make_env(args.env_id, p_tremble=args.p_tremble, horizon=args.horizon, seed=(args.seed, stream)) for stream in (6, 7))

    evaluation_env = make_env(args.env_id, p_tremble=args.p_tremble)
    demos, validation_demos, references = load_split(args.demos, env, args.n_demos, args.n_validation_demos, evaluation_env)
    expert_pairs = torch.as_tensor(np.concatenate([demos.observations, demos.actions], axis=1))
    expert_weight = len(expert_pairs) / demos.n_episodes / env.horizon
    validation_error = ValidationError(validation_demos, evaluation_env.horizon)

    obs_dim, action_dim = env.observation_space.shape[0], env.action_space.shape[0]
    f = Reward(obs_dim + action_dim)
    f_optimizer = OptimisticAdam(f)
    buffer = ReplayBuffer(args.buffer_size, obs_dim, action_dim)
    if args.learner == "sac":
        agent = SAC(obs_dim, env.action_space, args.gamma, args.tau, args.gsde, args.init_temperature, policy_rng)
        update = GraphedUpdate(agent) if args.device == "cuda" else agent.update
    else:
        agent = TD3BC(obs_dim, env.action_space, args.gamma, args.tau, args.critic_warmup, args.q_weight, expert_transitions(demos), policy_rng)
        update = agent.update
    for network in (f, *agent.networks) if args.standardize else ():
        network.standardize.fit(expert_pairs[:, :obs_dim])
    n_iterations = math.ceil(args.total_timesteps / args.iteration_timesteps)
    rollouts = Rollouts(n_iterations * args.n_rollouts * env.horizon, obs_dim + action_dim)
    counts = {"iteration": 0, "timesteps": 0, "rollout_timesteps": 0, "best_error": math.inf, "seconds": 0.0}

    parts = {"agent": agent, "buffer": buffer, "f": f, "f_optimizer": f_optimizer, "env": env, "rollout_env": rollout_env}
    parts |= {"rollouts": rollouts, "rngs": Generators(policy_rng, acting_rng, reward_rng, reset_rng, warmup_rng)}

    started = time.time()
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=args.device, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        observation, counts, references = env.observation, saved["counts"], saved["references"]
    else:
        random_env, random_rng = make_env(args.env_id, p_tremble=args.p_tremble, seed=(args.seed, 9, 1)), np.random.default_rng((args.seed, 9, 1))
        references["random policy"] = evaluate(random_env, lambda observation: random_env.random_action(random_rng), args.eval_episodes)["return"]
        if args.learner == "td3_bc":
            agent.clone(args.cloning_steps, args.batch_size, args.learning_rate)
        observation, _ = start_episode(env, demos, 1.0 if args.anneal_alpha else args.alpha, reset_rng)
    log = Log(folder, n_kept=counts["iteration"])
    progress = tqdm(total=args.total_timesteps, initial=counts["timesteps"], unit="step", disable=None)
    progress.write(f"{folder}: " + ", ".join(f"{name} {value:.0f}" for name, value in references.items()))
    started -= counts["seconds"]

    for iteration in range(counts["iteration"] + 1, n_iterations + 1):
        remaining = 1 - (iteration - 1) / n_iterations

        # ---- Reward player: no regret over sum_i L(pi_i, f), on whole trajectories of all policies so far, from the start states.
        rollouts.add(roll_out(rollout_env, sampler(agent.actor, acting_rng, args.train_freq), args.n_rollouts)[0])
        learner_pairs = rollouts.pairs
        counts["rollout_timesteps"] = len(learner_pairs)
        learner_weight = len(learner_pairs) / rollouts.n_episodes / env.horizon  # see moment_gap
        weights = (expert_weight, learner_weight) if args.payoff == "sum" else (1.0, 1.0)
        reward_logs = update_reward(f, f_optimizer, expert_pairs, learner_pairs, weights, args.disc_learning_rate * remaining, args, reward_rng)
        if args.rewards == "recomputed":
            buffer.n_labelled = 0  # so that `label` gives every transition in the buffer the new f's reward
        shift = reward_shift(f, expert_pairs, args)
        label(buffer, f, shift)
        if args.learner == "td3_bc":  # whose batches of demonstrations are worth what the new f says, whatever --rewards
            agent.expert_buffer.n_labelled = 0
            label(agent.expert_buffer, f, shift)

        # ---- Policy player: the learner on the learned reward, in episodes that start from an expert state with probability alpha.
        alpha = 1 - (iteration - 1) / max(1, n_iterations - 1) if args.anneal_alpha else args.alpha
        act = sampler(agent.actor, acting_rng, args.train_freq)
        n_episodes, n_expert_resets, policy_logs = 0, 0, {}
        for _ in range(min(args.iteration_timesteps, args.total_timesteps - counts["timesteps"])):
            warming_up = counts["timesteps"] < args.learning_starts
            action = env.random_action(warmup_rng) if warming_up else act(observation)
            next_observation, _, terminated, truncated, _ = env.step(action)  # the true reward is not looked at
            buffer.add(observation, action, next_observation, terminated)
            observation = next_observation
            if terminated or truncated:
                observation, is_expert_reset = start_episode(env, demos, alpha, reset_rng)
                n_episodes, n_expert_resets = n_episodes + 1, n_expert_resets + is_expert_reset
            counts["timesteps"] += 1
            progress.update()
            if counts["timesteps"] % args.train_freq == 0 and not warming_up:
                label(buffer, f, shift)
                learning_rate = torch.tensor(args.learning_rate * (1 - counts["timesteps"] / args.total_timesteps))
                for batch in buffer.sample(args.gradient_steps, args.batch_size, policy_rng):
                    policy_logs = update(batch, learning_rate)
                act = sampler(agent.actor, acting_rng, args.train_freq)  # with gSDE, new noise of the new policy
        label(buffer, f, shift)  # transitions since the last burst belong to this f

        # ---- Evaluation, and selection of the policy that is returned.
        evaluation = dict.fromkeys(("return", "return_std", "length", "validation_error", *(["success_percent"] if args.env_id in MAZE_ENVS else [])), "")
        if iteration % args.eval_every == 0 or iteration == n_iterations:
            scores, line = evaluate_and_select(args, folder, agent.actor, counts["timesteps"], validation_error, counts)
            evaluation |= scores
            progress.write("  ".join([line, f"gap {reward_logs['gap']:.3f}", *(f"{name} {value:.0f}" for name, value in references.items())]))
        counts["iteration"], counts["seconds"] = iteration, time.time() - started
        log.write(
            {"charts/timesteps": counts["timesteps"], "charts/all_timesteps": counts["timesteps"] + counts["rollout_timesteps"]}
            | {"charts/seconds": counts["seconds"]}
            | {f"eval/{name}": value for name, value in evaluation.items()}
            | {f"disc/{name}": float(value) for name, value in reward_logs.items()}
            | {"disc/shift": shift, "disc/learner_length": learner_weight * env.horizon}
            | {f"losses/{name}": float(policy_logs.get(name, math.nan)) for name in ("critic_loss", "actor_loss", "q", "entropy", "temperature")}
            | {"resets/alpha": alpha, "resets/episodes": n_episodes, "resets/expert_fraction": n_expert_resets / n_episodes if n_episodes else ""}
        )
        save_atomically(checkpoint, {name: part.state_dict() for name, part in parts.items()} | {"counts": counts, "references": references})
    progress.close()
    log.tensorboard.close()
    plot_learning_curve(folder, references)
    scores = report(args, folder)
    write_atomically(folder / "scores.json", json.dumps(scores | {"references": references}, indent=2))  # its presence says that the run is finished


def load_actor(args, env, state):
    """The policy that a run with `args` saved as `state`."""
    obs_dim = env.observation_space.shape[0]
    actor = Actor(obs_dim, env.action_space, args.gsde) if args.learner == "sac" else DeterministicActor(obs_dim, env.action_space)
    actor.load_state_dict(state)
    return actor


def report(args, folder):
    """Score the selected and the final policy, on episodes that neither training nor selection has seen. Training ends with this too."""
    env, scores = make_env(args.env_id), {}
    for name, what in (("policy.pt", "selected"), ("final_policy.pt", "final")):
        if not (folder / name).exists():
            raise SystemExit(f"{folder} has no {name} yet: the first is saved after {args.eval_every} outer iterations")
        saved = torch.load(folder / name, map_location=args.device, weights_only=True)
        actor = load_actor(args, env, saved["actor"])
        if scores and scores["selected"]["step"] == saved["step"]:
            score = scores["selected"]  # the same policy
        else:
            score = evaluate(make_env(args.env_id, p_tremble=args.p_tremble, seed=(args.seed, 11)), deterministic(actor), args.final_eval_episodes)
        percent = f" ({score['success_percent']:.0f} % successes)" if "success_percent" in score else ""
        print(f"{what} policy, {saved['step']} {X_AXIS[1]}: return {score['return']:.1f} +- {score['return_std']:.1f}{percent}"
              f" over {args.final_eval_episodes} episodes, p_tremble {args.p_tremble:g}")  # fmt: skip
        scores[what] = {"step": saved["step"], "episodes": args.final_eval_episodes} | score
    return scores


def main():
    args = tyro.cli(Args)
    if args.resume or args.eval:
        folder, mode = (Path(args.resume), "resume") if args.resume else (Path(args.eval), "eval")
        if args != Args(**{mode: getattr(args, mode)}):
            raise SystemExit(f"--{mode} takes every other argument from the run: leave the others out")
        if not (folder / "args.json").exists():
            raise SystemExit(f"{folder} holds no args.json: name the folder of a run, such as runs/RUN")
        saved = json.loads((folder / "args.json").read_text())
        if (script := saved.get("exp_name", "another script")) != Path(__file__).stem:
            raise SystemExit(f"{folder} was made by {script}, not by {Path(__file__).stem}: use the script that made it")
        if missing := [field.name for field in fields(Args) if field.name not in saved]:
            raise SystemExit(f"{folder} was made by a script without --{missing[0].replace('_', '-')}: use that version, commit {saved['versions']['commit']}")
        args = Args(**{field.name: saved[field.name] for field in fields(Args)} | ({"device": "cpu"} if mode == "eval" else {}))
    else:
        name = f"{args.env_id}__{Path(__file__).stem}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        mode, folder = "train", ROOT / "runs" / name.replace(":", "-").replace("/", "-")  # an id may be module:namespace/name
    if mode != "eval":  # which needs no demonstrations
        check_args(args)
    if args.device != "cpu":
        torch.set_default_device(args.device)
    torch.set_num_threads(args.torch_threads)
    torch.set_float32_matmul_precision(args.matmul_precision)
    if mode == "eval":
        try:
            report(args, folder)
        except ValueError as error:  # of the environment
            raise SystemExit(str(error)) from None
        return
    if mode == "train":
        if args.demos and Path(args.demos).exists():
            args.demos = str(Path(args.demos).resolve())  # a run may be resumed from another folder
        folder.mkdir(parents=True)
        write_atomically(folder / "args.json", json.dumps(describe_run(args), indent=2))
    try:
        with hold(folder):
            if mode == "resume" and (versions := describe_run(args)["versions"]) != saved["versions"]:
                saved.setdefault("resumed_with", []).append(versions)  # other code or packages may lead to other numbers
                write_atomically(folder / "args.json", json.dumps(saved, indent=2))
            train(args, folder)
    except KeyboardInterrupt:
        raise SystemExit(f"interrupted; to go on: python {sys.argv[0]} --resume {folder}") from None


if __name__ == "__main__":
    main()
