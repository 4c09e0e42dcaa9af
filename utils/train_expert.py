"""Train an expert with SAC on the true reward, in the environment that will be evaluated (trembling hand included), then record its demonstrations.

    python utils/train_expert.py --env-id HopperBulletEnv-v0
    python utils/train_expert.py --env-id HopperBulletEnv-v0 --record      only record, from the policy as it stands

A run that was interrupted goes on when it is started again. Demonstrations are recorded without trembling, as in the paper. They go to OUT/ENV.npz (see
utils/demos.py), the expert's returns with and without trembling beside them in OUT/ENV.json. The learner is the one of algos/filter_br.py, to the line.
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

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from algos.filter_br import SAC, Actor, ReplayBuffer, describe_run, deterministic, roll_out, sampler, save_atomically
from utils.demos import record, save
from utils.envs import get_state, make_env, set_state


@dataclass
class Args:
    env_id: str = "HopperBulletEnv-v0"
    """the task"""
    seed: int = 1
    """seed of every random stream of the run"""
    p_tremble: float = 0.1
    """probability, in training, that the environment executes a uniformly random action instead of the expert's"""
    total_timesteps: int = 1_000_000
    """environment steps of training"""
    eval_every: int = 25_000
    """environment steps between evaluations, which are also the checkpoints"""
    n_demos: int = 30
    """demonstrations to record: 25 to train on and 5 to select by"""
    out: str = ""
    """folder for everything (default: runs/expert/ENV_ID)"""
    record: bool = False
    """record demonstrations from the policy in `out` as it stands, and train no further"""
    matmul_precision: str = "highest"
    """torch's float32 matrix products: "highest", or "medium" for bfloat16 products, faster on CPUs with AMX"""

    # SAC, as in the paper's table
    buffer_size: int = 300_000
    """transitions in the replay buffer"""
    batch_size: int = 256
    """transitions in a gradient step"""
    gamma: float = 0.98
    """discount factor"""
    tau: float = 0.02
    """rate at which the target network follows"""
    train_freq: int = 64
    """environment steps between bursts of gradient steps"""
    gradient_steps: int = 64
    """gradient steps in a burst"""
    learning_rate: float = 7.3e-4
    """initial learning rate, decaying linearly to 0 over the whole run"""
    learning_starts: int = 10_000
    """environment steps with uniformly random actions before learning starts"""
    gsde: bool = True
    """state-dependent exploration noise"""
    init_temperature: float = 1.0
    """entropy temperature to start from"""


def write_atomically(path, text):
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def returns(args, actor, p_tremble, n_episodes, seed):
    """Undiscounted true returns of the deterministic policy, (n_episodes,)."""
    env = make_env(args.env_id, p_tremble=p_tremble, seed=seed)
    _, totals = roll_out(env, deterministic(actor), n_episodes)
    env.close()
    return np.array(totals)


def train(args, out):
    """SAC on the true reward; goes on where the checkpoint in `out` stands. Leaves `out`/policy.pt."""
    streams = [np.random.SeedSequence((args.seed, stream)) for stream in range(21, 24)]  # none of them the learner's
    torch.manual_seed(int(streams[0].generate_state(1)[0]))
    rng, warmup_rng = torch.Generator().manual_seed(int(streams[1].generate_state(1)[0])), np.random.default_rng(streams[2])
    env = make_env(args.env_id, p_tremble=args.p_tremble, seed=(args.seed, 24))
    obs_dim, action_dim = env.observation_space.shape[0], env.action_space.shape[0]
    agent = SAC(obs_dim, env.action_space, args.gamma, args.tau, args.gsde, args.init_temperature, rng)
    buffer = ReplayBuffer(args.buffer_size, obs_dim, action_dim)
    step = 0
    observation, _ = env.reset()
    if (out / "checkpoint.pt").exists():
        saved = torch.load(out / "checkpoint.pt", weights_only=True)
        agent.load_state_dict(saved["agent"])
        buffer.load_state_dict(saved["buffer"])
        rng.set_state(saved["rng"])
        warmup_rng.bit_generator.state = saved["warmup_rng"]
        env.set_rng_state(saved["env_rng"])
        step, observation = saved["step"], set_state(env, saved["env_state"].numpy())
    metrics = out / "metrics.jsonl"  # one row an evaluation; those after the checkpoint are written again
    rows = [line for line in metrics.read_text().splitlines(keepends=True) if json.loads(line)["step"] <= step] if step else []
    write_atomically(metrics, "".join(rows))

    act, logs, started, first_step = sampler(agent.actor, rng, args.train_freq), {}, time.time(), step
    while step < args.total_timesteps:
        warming_up = step < args.learning_starts
        action = env.random_action(warmup_rng) if warming_up else act(observation)
        next_observation, reward, terminated, truncated, _ = env.step(action)
        buffer.add(observation, action, next_observation, terminated, reward)
        observation = env.reset()[0] if terminated or truncated else next_observation
        step += 1
        if step % args.train_freq == 0 and not warming_up:
            learning_rate = args.learning_rate * (1 - step / args.total_timesteps)
            for batch in buffer.sample(args.gradient_steps, args.batch_size, rng):
                logs = agent.update(batch, learning_rate)
            act = sampler(agent.actor, rng, args.train_freq)
        if step % args.eval_every == 0 or step == args.total_timesteps:
            row = {"step": step} | {name: value.item() for name, value in logs.items()}
            row |= {f"return_p_tremble_{p:g}": returns(args, agent.actor, p, 5, (args.seed, 25, step)).mean() for p in (0.0, args.p_tremble)}
            row |= {"steps_per_second": (step - first_step) / (time.time() - started)}
            print("  ".join(f"{name} {value:.6g}" for name, value in row.items()), flush=True)
            rows.append(json.dumps(row) + "\n")
            write_atomically(metrics, "".join(rows))
            save_atomically(out / "policy.pt", {"actor": agent.actor.state_dict(), "step": step})
            state = {"agent": agent.state_dict(), "buffer": buffer.state_dict(), "rng": rng.get_state(), "warmup_rng": warmup_rng.bit_generator.state}
            state |= {"env_rng": env.rng_state(), "env_state": torch.from_numpy(get_state(env)), "step": step}
            save_atomically(out / "checkpoint.pt", state)
            act = sampler(agent.actor, rng, args.train_freq)  # as a resumed run starts


def record_demonstrations(args, out):
    """Record `args.n_demos` untrembled episodes of `out`/policy.pt, and measure it over 100 episodes with and without trembling."""
    env = make_env(args.env_id, seed=(args.seed, 26))
    saved = torch.load(out / "policy.pt", weights_only=True)
    actor = Actor(env.observation_space.shape[0], env.action_space, args.gsde)
    actor.load_state_dict(saved["actor"])
    made_by = f"utils/train_expert.py --env-id {args.env_id} --seed {args.seed} --p-tremble {args.p_tremble:g}, {saved['step']} steps"
    measured = {}
    for p_tremble in sorted({0.0, 0.1, args.p_tremble}):
        totals = returns(args, actor, p_tremble, 100, (args.seed, 27))
        measured[f"{p_tremble:g}"] = {"mean": totals.mean(), "std": totals.std(), "median": float(np.median(totals)), "episodes": 100}
    described = {name: value for name, value in describe_run(args).items() if name not in ("out", "record")} | {"exp_name": Path(__file__).stem}
    notes = {"returns": measured, "steps": saved["step"], "args": described}
    write_atomically(out / f"{args.env_id}.json", json.dumps(notes, indent=2) + "\n")
    save(out / f"{args.env_id}.npz", record(env, deterministic(actor), args.n_demos, made_by))
    print(json.dumps(measured, indent=2))


def main():
    args = tyro.cli(Args)
    out = Path(args.out) if args.out else ROOT / "runs" / "expert" / args.env_id
    out.mkdir(parents=True, exist_ok=True)
    if (out / f"{args.env_id}.npz").exists():
        raise SystemExit(f"{out} already holds demonstrations, which are not overwritten: give another --out")
    saved = json.loads((out / "args.json").read_text()) if (out / "args.json").exists() else asdict(args)
    changed = [name for name, value in asdict(args).items() if name != "record" and saved.get(name) != value]
    if changed:
        raise SystemExit(f"the run in {out} was started with another {', '.join(changed)}: give the same, or another --out")
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(args.matmul_precision)
    if not args.record:
        write_atomically(out / "args.json", json.dumps(asdict(args), indent=2))
        train(args, out)
    record_demonstrations(args, out)


if __name__ == "__main__":
    main()
