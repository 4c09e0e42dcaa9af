"""Train an expert with PPO on the true reward, by default in the environment that will be evaluated, trembling hand included; then record its demonstrations.

    python utils/train_expert.py --env-id HopperBulletEnv-v0
    python utils/train_expert.py --env-id HopperBulletEnv-v0 --record      only record, from the policy as it stands

Where the hand trembles from the start, PPO may learn to stand and no more, as on Walker2D. Two runs get further: one with `--p-tremble 0`, then one that starts
as a clone of its expert (`--clone FILE`) while the trembling grows (`--tremble-until`).

A run that was interrupted goes on when it is started again. Demonstrations are recorded without trembling, as in the paper. They go to OUT/ENV.npz (see
utils/demos.py), the expert's returns with and without trembling beside them in OUT/ENV.json.

The paper's experts are made by SAC. PPO needs more steps, but a step of it costs a tenth on a CPU.
"""

import json
import math
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
import tyro
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from algos.filter_br import describe_run, save_atomically, write_atomically
from utils.demos import load, record, save
from utils.envs import make_env, roll_out


@dataclass
class Args:
    env_id: str = "HopperBulletEnv-v0"
    """the task"""
    seed: int = 1
    """seed of every random stream of the run"""
    p_tremble: float = 0.1
    """probability, in training, that the environment executes a uniformly random action instead of the expert's"""
    tremble_from: float = 0.0
    """fraction of the run after which the hand begins to tremble"""
    tremble_until: float = 0.0
    """fraction of the run after which it trembles with probability `p_tremble`; in between the probability grows linearly"""
    clone: str = ""
    """demonstrations, an .npz file, whose policy is cloned to start from (default: random weights)"""
    total_timesteps: int = 3_000_000
    """environment steps of training"""
    eval_every: int = 25
    """iterations between evaluations, which are also the checkpoints"""
    n_demos: int = 30
    """demonstrations to record: 25 to train on and 5 to select by"""
    out: str = ""
    """folder for everything (default: runs/expert/ENV_ID)"""
    record: bool = False
    """record demonstrations from the policy in `out` as it stands, and train no further"""

    # PPO, after the settings of public benchmarks; unlike in SAC's Actor, the noise's variance does shape the features
    n_envs: int = 16
    """environments stepped in turn"""
    n_steps: int = 512
    """steps of each environment in an iteration"""
    n_epochs: int = 20
    """passes over an iteration's steps"""
    batch_size: int = 128
    """steps in a gradient step"""
    learning_rate: float = 4e-5
    """initial learning rate of Adam, decaying linearly to 0 over the run"""
    clip_range: float = 0.4
    """the ratio of new to old probability counts up to 1 +- this"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.9
    """lambda of the advantage estimate"""
    max_grad_norm: float = 0.5
    """norm that gradients are clipped to"""
    log_std_init: float = -2.0
    """logarithm of the exploration matrix's initial standard deviation"""
    noise_hold: int = 4
    """steps for which an exploration matrix is held"""


class RunningNorm(nn.Module):
    """Mean and variance of all rows seen so far (Chan et al. 1979), and rows standardised by them, clipped to +-10."""

    def __init__(self, *shape):
        super().__init__()
        for name, value in (("mean", torch.zeros(shape)), ("var", torch.ones(shape)), ("count", torch.tensor(1e-4))):
            self.register_buffer(name, value.double())

    def update(self, rows):
        rows = rows.double()
        mean, var, n = rows.mean(0), rows.var(0, unbiased=False), len(rows)
        delta, total = mean - self.mean, self.count + n
        self.var = (self.var * self.count + var * n + delta.square() * self.count * n / total) / total
        self.mean, self.count = self.mean + delta * n / total, total

    def forward(self, rows):
        return ((rows - self.mean) / (self.var + 1e-8).sqrt()).clamp(-10, 10).float()


class Policy(nn.Module):
    """u = mean(s) + h(s) E, E ~ N(0, std^2): Gaussian with state-dependent exploration (Raffin et al. 2021). The task clips u to its bounds."""

    def __init__(self, obs_dim, action_space, log_std_init=-2.0, hidden=256):
        super().__init__()
        action_dim = action_space.shape[0]
        self.norm = RunningNorm(obs_dim)
        self.hidden = nn.Sequential(nn.Linear(obs_dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.mean = nn.Linear(hidden, action_dim)
        self.value = nn.Sequential(nn.Linear(obs_dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.log_std = nn.Parameter(torch.full((hidden, action_dim), log_std_init))
        self.register_buffer("scale", torch.as_tensor((action_space.high - action_space.low) / 2, dtype=torch.float32))
        self.register_buffer("bias", torch.as_tensor((action_space.high + action_space.low) / 2, dtype=torch.float32))

    def distribution(self, normed):
        """Hidden features, mean and variance of u, each (B, .), of standardised observations (B, obs_dim)."""
        h = self.hidden(normed)
        return h, self.mean(h), h.square() @ (2 * self.log_std).exp() + 1e-6

    def to_action(self, u):
        """From units of the action range to the environment's, clipped to its bounds."""
        return self.scale * u.clamp(-1, 1) + self.bias

    def act(self, observation):
        """The deterministic head: observation (obs_dim,) -> action (action_dim,), float32 arrays."""
        with torch.no_grad():
            return self.to_action(self.mean(self.hidden(self.norm(torch.from_numpy(observation)[None]))))[0].numpy()


def log_density(u, mean, variance):
    """(B,): of the independent Gaussians N(mean, variance) at u, each (B, action_dim)."""
    return -0.5 * ((u - mean).square() / variance + variance.log() + math.log(2 * math.pi)).sum(-1)


def advantages(rewards, values, next_values, terminated, ended, gamma, gae_lambda):
    """Generalised advantage estimates (Schulman et al. 2016), (n_steps, n_envs) like every argument.

    `next_values` are those of the state that each step led to, before any reset, so that the horizon is bootstrapped and termination is not; the sum over
    later steps stops where the episode `ended` for either reason.
    """
    estimates, following = torch.empty_like(rewards), torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * (1 - terminated[t]) * next_values[t] - values[t]
        following = estimates[t] = delta + gamma * gae_lambda * (1 - ended[t]) * following
    return estimates


def clone(policy, demos, rng, n_steps=8000, batch_size=256, std=0.12):
    """Behavioural cloning of the deterministic head. Exploration noise then has standard deviation `std` (root mean square over the demonstrations' states)."""
    observations = torch.from_numpy(demos.observations)
    policy.norm.update(observations)
    normed, targets = policy.norm(observations), (torch.from_numpy(demos.actions) - policy.bias) / policy.scale
    optimizer = torch.optim.Adam([*policy.hidden.parameters(), *policy.mean.parameters()], lr=1e-3, fused=True)
    for i in range(n_steps):
        rows = torch.randint(len(normed), (batch_size,), generator=rng)
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - i / n_steps)
        optimizer.zero_grad()
        (policy.mean(policy.hidden(normed[rows])) - targets[rows]).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        policy.log_std.fill_(math.log(std / policy.hidden(normed).square().sum(1).mean().sqrt()))


def returns(args, policy, p_tremble, n_episodes, seed):
    """Undiscounted true returns of the deterministic policy, (n_episodes,)."""
    env = make_env(args.env_id, p_tremble=p_tremble, seed=seed)
    _, totals = roll_out(env, policy.act, n_episodes)
    env.close()
    return np.array(totals)


def train(args, out):
    """PPO on the true reward; goes on where the checkpoint in `out` stands. Leaves `out`/policy.pt."""
    streams = [np.random.SeedSequence((args.seed, stream)) for stream in range(21, 23)]  # none of them the learner's
    torch.manual_seed(int(streams[0].generate_state(1)[0]))
    rng = torch.Generator().manual_seed(int(streams[1].generate_state(1)[0]))
    envs = [make_env(args.env_id, p_tremble=args.p_tremble, seed=(args.seed, 24, i)) for i in range(args.n_envs)]
    obs_dim, action_dim = envs[0].observation_space.shape[0], envs[0].action_space.shape[0]
    policy, return_norm = Policy(obs_dim, envs[0].action_space, args.log_std_init), RunningNorm()
    optimizer = torch.optim.Adam(policy.parameters(), eps=1e-5, fused=True)
    observations, discounted = torch.from_numpy(np.stack([env.reset()[0] for env in envs])), torch.zeros(args.n_envs)
    step = iteration = 0
    if (out / "checkpoint.pt").exists():
        saved = torch.load(out / "checkpoint.pt", weights_only=True)
        policy.load_state_dict(saved["policy"])
        return_norm.load_state_dict(saved["return_norm"])
        optimizer.load_state_dict(saved["optimizer"])
        rng.set_state(saved["rng"])
        step, iteration, discounted = saved["step"], saved["iteration"], saved["discounted"]
        for env, state in zip(envs, saved["envs"], strict=True):
            env.load_state_dict(state)
        observations = torch.from_numpy(np.stack([env.observation for env in envs]))
    metrics = out / "metrics.jsonl"  # one row an evaluation; those after the checkpoint are written again
    rows = [line for line in metrics.read_text().splitlines(keepends=True) if json.loads(line)["step"] <= step] if step else []
    write_atomically(metrics, "".join(rows))

    if args.clone and step == 0:
        clone(policy, load(args.clone, make_env(args.env_id), check_dynamics=False), rng)  # main has checked it

    shape = (args.n_steps, args.n_envs)
    all_normed, all_next_normed, us = torch.empty(*shape, obs_dim), torch.empty(*shape, obs_dim), torch.empty(*shape, action_dim)
    log_probs, rewards, terminated, ended, all_own = (torch.empty(shape) for _ in range(5))
    started, first_step = time.time(), step
    while step < args.total_timesteps:
        # ---- Collect n_steps of each environment with the present policy.
        for env in envs:
            env.p_tremble = args.p_tremble * np.interp(step / args.total_timesteps, (args.tremble_from, args.tremble_until), (0, 1))
        for t in range(args.n_steps):
            with torch.no_grad():
                if t == 0:
                    policy.norm.update(observations)
                if t % args.noise_hold == 0:
                    noise = policy.log_std.exp() * torch.randn(args.n_envs, *policy.log_std.shape, generator=rng)
                normed = policy.norm(observations)
                h, mean, variance = policy.distribution(normed)
                u = mean + torch.bmm(h[:, None], noise)[:, 0]
                all_normed[t], us[t], log_probs[t] = normed, u, log_density(u, mean, variance)
                actions = policy.to_action(u).numpy()
            raw_rewards, next_observations = torch.empty(args.n_envs), torch.empty_like(observations)
            for i, env in enumerate(envs):
                observation, raw_rewards[i], terminated[t, i], truncated, info = env.step(actions[i])
                all_own[t, i] = bool((info["executed_action"] == actions[i]).all())
                ended[t, i] = bool(terminated[t, i]) or truncated
                next_observations[i] = torch.from_numpy(observation)
                observations[i] = torch.from_numpy(env.reset()[0] if ended[t, i] else observation)
            all_next_normed[t] = policy.norm(next_observations)
            policy.norm.update(next_observations)
            # Rewards are scaled by the spread of their discounted sums, so that values are of order 1.
            discounted = raw_rewards + args.gamma * discounted
            return_norm.update(discounted)
            rewards[t] = raw_rewards / (return_norm.var + 1e-8).sqrt().float()
            discounted = discounted * (1 - ended[t])
        step, iteration = step + args.n_steps * args.n_envs, iteration + 1

        # ---- Improve policy and value on them.
        with torch.no_grad():
            values, next_values = policy.value(all_normed).squeeze(-1), policy.value(all_next_normed).squeeze(-1)
        estimates = advantages(rewards, values, next_values, terminated, ended, args.gamma, args.gae_lambda)
        data = torch.cat([all_normed, us, log_probs[..., None], estimates[..., None], (estimates + values)[..., None], all_own[..., None]], -1).flatten(0, 1)
        learning_rate = args.learning_rate * max(0.0, 1 - step / args.total_timesteps)
        optimizer.param_groups[0]["lr"] = learning_rate
        torch.set_flush_denormal(True)  # as optimistic Adam does
        for _ in range(args.n_epochs):
            for batch in data[torch.randperm(len(data), generator=rng)].split(args.batch_size):
                normed, u, (old_log_prob, advantage, target, own) = batch[:, :obs_dim], batch[:, obs_dim:-4], batch[:, -4:].T
                # Advantages are standardised, over the policy's own actions; what follows a random one says nothing about the policy, and counts as 0.
                n_own = own.sum().clamp(min=2)
                advantage = own * (advantage - (own * advantage).sum() / n_own)
                advantage = advantage / ((advantage.square().sum() / (n_own - 1)).sqrt() + 1e-8)
                _, mean, variance = policy.distribution(normed)
                log_ratio = log_density(u, mean, variance) - old_log_prob
                ratio = log_ratio.exp()
                gain = torch.minimum(ratio * advantage, ratio.clamp(1 - args.clip_range, 1 + args.clip_range) * advantage).sum() / n_own
                value_loss = (policy.value(normed).squeeze(-1) - target).square().mean()
                optimizer.zero_grad()
                (0.5 * value_loss - gain * (not args.clone or iteration > 6)).backward()  # a clone waits for its value function
                nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
                optimizer.step()
        torch.set_flush_denormal(False)  # the simulator keeps them

        if iteration % args.eval_every == 0 or step >= args.total_timesteps:
            row = {"step": step, "kl": (ratio - 1 - log_ratio).mean().item(), "value_loss": value_loss.item(), "std": variance.mean().sqrt().item()}
            row |= {f"return_p_tremble_{p:g}": returns(args, policy, p, 5, (args.seed, 25, step)).mean() for p in sorted({0.0, args.p_tremble})}
            row |= {"steps_per_second": (step - first_step) / (time.time() - started)}
            print("  ".join(f"{name} {value:.6g}" for name, value in row.items()), flush=True)
            rows.append(json.dumps(row) + "\n")
            write_atomically(metrics, "".join(rows))
            save_atomically(out / "policy.pt", {"policy": policy.state_dict(), "step": step})
            state = {"policy": policy.state_dict(), "return_norm": return_norm.state_dict(), "optimizer": optimizer.state_dict(), "rng": rng.get_state()}
            state |= {"step": step, "iteration": iteration, "discounted": discounted, "envs": [env.state_dict() for env in envs]}
            save_atomically(out / "checkpoint.pt", state)


def file_name(args):
    """The task's id, which may be module:namespace/name, as the name of a file."""
    return args.env_id.replace(":", "-").replace("/", "-")


def record_demonstrations(args, out):
    """Record `args.n_demos` untrembled episodes of `out`/policy.pt, and measure it over 100 episodes with and without trembling."""
    if not (out / "policy.pt").exists():
        raise SystemExit(f"{out} holds no policy.pt: train first, without --record")
    env = make_env(args.env_id, seed=(args.seed, 26))
    saved = torch.load(out / "policy.pt", weights_only=True)
    policy = Policy(env.observation_space.shape[0], env.action_space)
    policy.load_state_dict(saved["policy"])
    made_by = f"utils/train_expert.py --env-id {args.env_id} --seed {args.seed} --p-tremble {args.p_tremble:g}, {saved['step']} steps"
    measured = {}
    for p_tremble in sorted({0.0, 0.1, args.p_tremble}):
        totals = returns(args, policy, p_tremble, 100, (args.seed, 27))
        measured[f"{p_tremble:g}"] = {"mean": totals.mean(), "std": totals.std(), "median": float(np.median(totals)), "episodes": 100}
    described = {name: value for name, value in describe_run(args).items() if name not in ("out", "record")} | {"exp_name": Path(__file__).stem}
    notes = {"returns": measured, "steps": saved["step"], "args": described}
    write_atomically(out / f"{file_name(args)}.json", json.dumps(notes, indent=2) + "\n")
    save(out / f"{file_name(args)}.npz", record(env, policy.act, args.n_demos, made_by))
    print(json.dumps(measured, indent=2))


def main():
    args = tyro.cli(Args)
    for field in fields(args):
        value, least = getattr(args, field.name), 0 if field.name == "seed" else 1
        if field.type is int and value < least:
            raise SystemExit(f"--{field.name.replace('_', '-')} is {value}: give at least {least}")
    if not 0 <= args.tremble_from <= args.tremble_until <= 1:
        raise SystemExit(f"--tremble-from {args.tremble_from} --tremble-until {args.tremble_until}: give fractions of the run, from 0 to 1, in this order")
    try:
        env = make_env(args.env_id, p_tremble=args.p_tremble)
        if not hasattr(env.action_space, "high"):
            raise SystemExit(f"--env-id {args.env_id} has discrete actions, and this script needs continuous ones: choose another task")
        if args.clone:
            load(args.clone, env)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    out = Path(args.out) if args.out else ROOT / "runs" / "expert" / file_name(args)
    out.mkdir(parents=True, exist_ok=True)
    if (out / f"{file_name(args)}.npz").exists():
        raise SystemExit(f"{out} already holds demonstrations, which are not overwritten: give another --out")
    saved = json.loads((out / "args.json").read_text()) if (out / "args.json").exists() else asdict(args)
    changed = [name for name, value in asdict(args).items() if name not in ("out", "record", "n_demos") and saved.get(name) != value]
    if changed:
        raise SystemExit(f"the run in {out} was started with another {', '.join(changed)}: give the same, or another --out")
    torch.set_num_threads(1)
    if not args.record:
        write_atomically(out / "args.json", json.dumps(asdict(args), indent=2))
        train(args, out)
    record_demonstrations(args, out)


if __name__ == "__main__":
    main()
