"""Train an expert with SAC in the environment that will be evaluated (trembling hand included), then record its demonstrations without trembling.

    python utils/train_expert.py --env-id HopperBulletEnv-v0
    python utils/train_expert.py --env-id HopperBulletEnv-v0 --resume      go on with an interrupted run
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import tyro

sys.path.append(str(Path(__file__).resolve().parents[1]))
from algos.filter_br import SAC, ReplayBuffer  # the learner's own SAC, here on the true reward
from utils.envs import make_env


@dataclass
class Args:
    env_id: str = "HopperBulletEnv-v0"
    """the task"""
    seed: int = 1
    """seed of everything random"""
    p_tremble: float = 0.1
    """probability that the environment executes a random action instead of the expert's, in training"""
    total_timesteps: int = 1_000_000
    """environment steps of training"""
    buffer_size: int = 300_000
    """replay buffer, in transitions"""
    batch_size: int = 256
    """transitions in a gradient step"""
    gamma: float = 0.98
    """discount factor"""
    tau: float = 0.02
    """rate of the target network"""
    train_freq: int = 64
    """environment steps between bursts of gradient steps"""
    gradient_steps: int = 64
    """gradient steps in a burst"""
    learning_rate: float = 7.3e-4
    """initial learning rate, decaying linearly to 0 over the run"""
    learning_starts: int = 10_000
    """uniformly random actions before learning starts"""
    gsde: bool = True
    """state-dependent exploration"""
    matmul_precision: str = "highest"
    """torch's float32 matrix product precision; "medium" (bfloat16 products) is faster on CPUs with AMX"""
    out: str = ""
    """folder of checkpoints and results (default: runs/expert_ENV_SEED)"""
    resume: bool = False
    """go on with the run in `out`"""


def evaluate(env_id, actor, p_tremble, n_episodes, seed):
    """Undiscounted true returns (n_episodes,) of the deterministic policy."""
    env = make_env(env_id, p_tremble=p_tremble, seed=seed)
    returns = []
    for _ in range(n_episodes):
        observation, _ = env.reset()
        total, done = 0.0, False
        while not done:
            with torch.no_grad():
                action = actor(torch.from_numpy(observation)[None])[0].numpy()
            observation, reward, terminated, truncated, _ = env.step(action)
            total, done = total + reward, terminated or truncated
        returns.append(total)
    env.close()
    return np.array(returns)


def save_atomically(path, content):
    temporary = f"{path}.tmp"
    torch.save(content, temporary)
    os.replace(temporary, path)


def train(args):
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(args.matmul_precision)
    out = Path(args.out or f"runs/expert_{args.env_id}_{args.seed}")
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out / "checkpoint.pt"
    torch.manual_seed(args.seed)
    rng = torch.Generator().manual_seed(args.seed)
    warmup_rng = np.random.default_rng(args.seed)
    env = make_env(args.env_id, p_tremble=args.p_tremble, seed=args.seed)
    obs_dim, action_dim = env.observation_space.shape[0], env.action_space.shape[0]
    agent = SAC(obs_dim, env.action_space, args.gamma, args.tau, args.gsde, init_temperature=1.0, rng=rng)
    buffer = ReplayBuffer(args.buffer_size, obs_dim, action_dim)
    step = 0
    if args.resume and checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        agent.load_state_dict(saved["agent"])
        buffer.load_state_dict(saved["buffer"])
        rng.set_state(saved["rng"])
        step = saved["step"]
    observation, _ = env.reset()
    noise, start = None, time.time()
    first_step = step
    while step < args.total_timesteps:
        if step % args.train_freq == 0:
            with torch.no_grad():
                noise = agent.actor.sample_noise(rng)
        if step < args.learning_starts:
            action = env.random_action(warmup_rng)
        else:
            with torch.no_grad():
                action = agent.actor.sample(torch.from_numpy(observation)[None], rng, noise)[0][0].numpy()
        next_observation, reward, terminated, truncated, _ = env.step(action)
        buffer.add(observation, action, next_observation, terminated, reward)
        observation = next_observation
        if terminated or truncated:
            observation, _ = env.reset()
        step += 1
        if step % args.train_freq == 0 and step > args.learning_starts:
            learning_rate = args.learning_rate * (1 - step / args.total_timesteps)
            for batch in buffer.sample(args.gradient_steps, args.batch_size, rng):
                logs = agent.update(batch, learning_rate)
        if step % 25_000 == 0:
            tremble = evaluate(args.env_id, agent.actor, args.p_tremble, 5, seed=10_000 + step)
            plain = evaluate(args.env_id, agent.actor, 0.0, 2, seed=10_000 + step)
            line = dict(step=step, p_tremble=args.p_tremble, tremble=tremble.mean(), plain=plain.mean(), temperature=agent.log_temperature[0].exp().item(),
                        **{k: v.item() for k, v in logs.items()}, steps_per_second=(step - first_step) / (time.time() - start))
            print(json.dumps(line), flush=True)
            save_atomically(out / "policy.pt", {"actor": agent.actor.state_dict(), "args": asdict(args), "step": step})
            save_atomically(checkpoint, {"agent": agent.state_dict(), "buffer": buffer.state_dict(), "rng": rng.get_state(), "step": step})


if __name__ == "__main__":
    train(tyro.cli(Args))
