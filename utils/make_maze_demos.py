"""Make demonstrations for AntMaze and PointMaze, in D4RL's file format.

    python utils/make_maze_demos.py --env-id PointMaze_Large-v0         a scripted controller: seconds
    python utils/make_maze_demos.py --env-id antmaze-large-play-v2      trains an ant to walk first; goes on where it was interrupted
    python utils/make_maze_demos.py --env-id antmaze-large-play-v2 --record      only records, with the walker as it stands

The expert plans and walks. Breadth-first search over the maze's cells names the next cell on the way to the goal, and a controller heads for its centre: for
the ball a proportional one, for the ant a policy trained by SAC on an open plane. Both see only the present observation, so the expert is a policy, which
Gaussian noise then disturbs as D4RL's did. Episodes that miss the goal are left out; the file says how many.

What is written are *not* D4RL's demonstrations, and the file's attributes say so. Its layout is D4RL's (see utils/d4rl.py): single precision, and nothing of
the contact solver. So that a restored step still gives the recorded numbers to the bit, each state is rounded to what the file keeps before it is acted on.
"""

import json
import math
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from algos.filter_br import SAC, Actor, ReplayBuffer, describe_run, deterministic, sampler, save_atomically, write_atomically
from utils.d4rl import write_demos
from utils.demos import installed_versions, load
from utils.envs import MAZE_ENVS, make_env, set_state
from utils.mazes import AntMaze, cell_centre, cell_of

NOT_OF_THE_WALKER = ("env_id", "out", "record", "n_demos", "horizon", "noise")  # arguments that may change between training and recording


@dataclass
class Args:
    env_id: str = "antmaze-large-play-v2"
    """the task: an AntMaze or a PointMaze"""
    seed: int = 1
    """seed of every random stream"""
    n_demos: int = 50
    """successful demonstrations to record"""
    horizon: int = 700
    """steps within which a demonstration must reach the goal: the learner's horizon"""
    noise: float = 0.2
    """standard deviation of the noise on the expert's actions, which lie in [-1, 1]"""
    out: str = ""
    """folder for everything (default: runs/expert/ENV_ID)"""
    record: bool = False
    """record with the walker in `out` as it stands, and train no further"""

    # The ant's walk, by SAC
    total_timesteps: int = 120_000
    """environment steps of training"""
    eval_every: int = 10_000
    """environment steps between evaluations, which are also the checkpoints"""
    episode_length: int = 400
    """steps of a training episode"""
    learning_starts: int = 2000
    """steps with uniformly random actions, before learning starts"""
    train_freq: int = 50
    """steps between bursts of gradient steps"""
    gradient_steps: int = 25
    """gradient steps in a burst"""
    batch_size: int = 256
    """transitions in a gradient step"""
    learning_rate: float = 7e-4
    """initial learning rate, decaying linearly to 0 over the run"""
    gamma: float = 0.99
    """discount factor"""
    tau: float = 0.005
    """rate at which the target network follows"""
    flip_penalty: float = 10.0
    """what it costs to fall over, in metres per second of one step"""


# ===================================================================================================================== an ant that only walks forward


ANKLE_SIGNS = np.array([1.0, -1.0, -1.0, 1.0])  # times an ankle's angle: positive away from the body's centre for all four legs
ACTUATOR_LEGS = [3, 0, 1, 2]  # the model's motors begin with its fourth leg
WALK_DIM = 32


def rotation(angle):
    """(3, 3): rotation about the z axis by `angle` radians."""
    c, s = math.cos(angle), math.sin(angle)
    return np.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]])


def orientation(quaternion):
    """(3, 3): the rotation of a quaternion (4,), which need not be normalised."""
    w, x, y, z = quaternion / np.linalg.norm(quaternion)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )


def to_walk_frame(observation, heading):
    """The ant as its walker sees it, float32 (32,), in a frame whose x axis is `heading` (radians), and which leg comes first.

    The four legs are alike: turning the ant by a quarter and renaming its legs changes nothing. Of its four names, the walker sees that under which
    the ant faces within 45 degrees of `heading`: it need only learn to walk forward. Takes AntMaze's observation; position and goal play no part.
    """
    turn = rotation(-heading)
    body = turn @ orientation(observation[3:7])
    first_leg = -round(math.atan2(body[1, 0], body[0, 0]) / (math.pi / 2))
    rename = rotation(first_leg * math.pi / 2)
    body, velocity, spin = body @ rename, turn @ observation[15:18], rename.T @ observation[18:21]  # the spin is in the body's own frame
    hips, ankles, hip_speeds, ankle_speeds = observation[7:15:2], ANKLE_SIGNS * observation[8:15:2], observation[21:29:2], ANKLE_SIGNS * observation[22:29:2]
    legs = [np.roll(x, -first_leg) for x in (hips, ankles - math.radians(50), 0.2 * hip_speeds, 0.2 * ankle_speeds)]
    return np.concatenate([observation[2:3], body.ravel(), velocity, 0.2 * spin, *legs], dtype=np.float32), first_leg


def from_walk_frame(action, first_leg):
    """AntMaze's action (8,) for the walker's: torques on four hips and four ankles, those of `first_leg` first."""
    hips, ankles = np.roll(action[:4], first_leg), ANKLE_SIGNS * np.roll(action[4:], first_leg)
    return np.stack([hips, ankles], axis=1)[ACTUATOR_LEGS].ravel()


class Walk:
    """The walker's task: AntMaze's ant on an open plane, to head for a direction that changes now and then. The reward is its speed that way, in m/s."""

    def __init__(self, args, stream):
        self.args, self.rng = args, np.random.default_rng((args.seed, stream))
        self.ant = AntMaze("open")
        self.action_space = self.ant.action_space

    def reset(self):
        self.observation, _ = self.ant.reset(seed=int(self.rng.integers(2**31)))
        self.t = 0
        return self.turn()

    def turn(self):
        self.heading, self.until = self.rng.uniform(-math.pi, math.pi), self.t + int(self.rng.integers(30, 120))
        return self.observe()

    def observe(self):
        walk, self.first_leg = to_walk_frame(self.observation, self.heading)
        return walk

    def step(self, action):
        """Returns the next observation under the same heading, the reward, whether the ant fell, and whether the episode ends. Then call `turn` if due."""
        before = self.observation[:2]
        self.observation, *_ = self.ant.step(from_walk_frame(action, self.first_leg))
        self.t += 1
        progress = (self.observation[:2] - before) @ [math.cos(self.heading), math.sin(self.heading)] / self.ant.dt
        fell = bool(orientation(self.observation[3:7])[2, 2] < 0.2)
        return self.observe(), progress - self.args.flip_penalty * fell, fell, fell or self.t >= self.args.episode_length

    def state_dict(self):
        numbers = torch.tensor([*self.ant.get_state(), self.t, self.heading, self.until], dtype=torch.float64)
        return {"numbers": numbers, "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state):
        *physics, t, self.heading, until = state["numbers"].tolist()
        self.observation, self.t, self.until, self.rng.bit_generator.state = self.ant.set_state(physics), int(t), int(until), state["rng"]


def evaluate(args, act, step, n_episodes=5):
    """Mean speed in the wanted direction (m/s) and the share of episodes in which the ant fell."""
    walk, speeds, falls = Walk(args, (32, step)), [], []
    for _ in range(n_episodes):
        observation, done = walk.reset(), False
        while not done:
            observation, reward, fell, done = walk.step(act(observation))
            speeds.append(reward + args.flip_penalty * fell)
            if walk.t == walk.until:
                observation = walk.turn()
        falls.append(fell)
    return {"speed": float(np.mean(speeds)), "falls": float(np.mean(falls))}


def train_walker(args, out):
    """SAC on `Walk`; goes on where the checkpoint in `out` stands. Leaves `out`/walker.pt."""
    streams = [np.random.SeedSequence((args.seed, stream)) for stream in (33, 34)]
    torch.manual_seed(int(streams[0].generate_state(1)[0]))  # initial weights
    rng = torch.Generator().manual_seed(int(streams[1].generate_state(1)[0]))
    walk, warmup_rng = Walk(args, 35), np.random.default_rng((args.seed, 36))
    agent = SAC(WALK_DIM, walk.action_space, args.gamma, args.tau, False, 0.2, rng)
    buffer = ReplayBuffer(args.total_timesteps, WALK_DIM, 8)
    checkpoint, metrics, step = out / "checkpoint.pt", out / "metrics.jsonl", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        for name, thing in (("agent", agent), ("buffer", buffer), ("walk", walk)):
            thing.load_state_dict(saved[name])
        rng.set_state(saved["rng"])
        warmup_rng.bit_generator.state, step, observation = saved["warmup_rng"], saved["step"], walk.observe()
    else:
        observation = walk.reset()
    rows = [line for line in metrics.read_text().splitlines(keepends=True) if json.loads(line)["step"] <= step] if step else []
    act, started, first_step, logs = sampler(agent.actor, rng, 1), time.time(), step, {}
    while step < args.total_timesteps:
        action = walk.action_space.low + 2 * warmup_rng.random(8) if step < args.learning_starts else act(observation)
        next_observation, reward, fell, done = walk.step(action)
        buffer.add(observation, action, next_observation, fell, reward)
        observation = walk.reset() if done else walk.turn() if walk.t == walk.until else next_observation
        step += 1
        if step % args.train_freq == 0 and step >= args.learning_starts:
            learning_rate = args.learning_rate * (1 - step / args.total_timesteps)
            for batch in buffer.sample(args.gradient_steps, args.batch_size, rng):
                logs = agent.update(batch, learning_rate)
        if step % args.eval_every == 0 or step == args.total_timesteps:
            row = {"step": step} | evaluate(args, deterministic(agent.actor), step) | {name: float(value) for name, value in logs.items()}
            row |= {"steps_per_second": (step - first_step) / (time.time() - started)}
            print("  ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
            rows.append(json.dumps(row) + "\n")
            write_atomically(metrics, "".join(rows))
            save_atomically(out / "walker.pt", {"actor": agent.actor.state_dict(), "step": step})
            state = {"agent": agent.state_dict(), "buffer": buffer.state_dict(), "walk": walk.state_dict(), "rng": rng.get_state()}
            save_atomically(checkpoint, state | {"warmup_rng": warmup_rng.bit_generator.state, "step": step})


# ================================================================================================================================== plan and record


@lru_cache(maxsize=None)
def shortest_path(layout, start, goal):
    """The cells of a shortest path from `start` to `goal`, both included, in steps up, down, left and right. `layout` is a tuple of rows.

    Raises ValueError where there is none. Breadth-first from the goal, so that following the path again from any of its cells gives the rest of it.
    """
    onward, frontier = {goal: None}, deque([goal])
    while frontier and start not in onward:
        cell = i, j = frontier.popleft()
        for i, j in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)):
            if 0 <= i < len(layout) and 0 <= j < len(layout[i]) and layout[i][j] != "#" and (i, j) not in onward:
                onward[i, j] = cell
                frontier.append((i, j))
    if start not in onward:
        raise ValueError(f"there is no way from cell {start} to cell {goal}")
    path = [start]
    while path[-1] != goal:
        path.append(onward[path[-1]])
    return path


def waypoint(layout, xy, goal):
    """(2,): where to head from the point `xy`: the goal, in its own cell, and else the centre of the next cell on the way."""
    path = shortest_path(tuple(layout), cell_of(xy), cell_of(goal))
    return goal if len(path) == 1 else cell_centre(path[1])


def push(observation, target, speed=2.0):
    """PointMaze's action towards `target`: the force that changes its velocity to `speed` (m/s) in that direction, as far as one step can."""
    way = target - observation[:2]
    return 2 * (speed * way / max(np.linalg.norm(way), 1e-6) - observation[2:4])


def walker(actor):
    """AntMaze's action towards `target`, by the trained walker."""
    act = deterministic(actor)

    def walk(observation, target):
        walk_observation, first_leg = to_walk_frame(observation.astype(np.float64), math.atan2(*(target - observation[:2])[::-1]))
        return from_walk_frame(act(walk_observation), first_leg)

    return walk


def record(env, controller, args):
    """`args.n_demos` successful episodes as D4RL's arrays (see utils/d4rl.py), and how many it took. `controller`: observation, target -> action."""
    noise_rng, rows, n_episodes, n_successes = np.random.default_rng((args.seed, 37)), [], 0, 0
    nq, nv = env.unwrapped.model.nq, env.unwrapped.model.nv
    while n_successes < args.n_demos:
        observation, _ = env.reset()
        episode, done, n_episodes = [], False, n_episodes + 1
        while not done:
            observation = set_state(env, np.concatenate([[env.t], np.zeros(nv), observation]))  # what the file keeps is where the step begins
            action = controller(observation, waypoint(env.unwrapped.layout, observation[:2], observation[-2:]))
            action = np.clip(action + args.noise * noise_rng.standard_normal(len(action)), -1, 1).astype(np.float32)
            after, reward, terminated, truncated, _ = env.step(action)
            episode.append((observation[:-2], action, reward, terminated, truncated, observation[-2:], after[:nq], after[nq : nq + nv]))
            observation, done = after, terminated or truncated
        if terminated:
            rows, n_successes = rows + episode, n_successes + 1
        if n_episodes >= 10 * args.n_demos and n_successes < args.n_demos:
            raise SystemExit(f"only {n_successes} of {n_episodes} episodes reached the goal within {args.horizon} steps: train longer, or give less --noise")
    names = ("observations", "actions", "rewards", "terminals", "timeouts", "infos/goal", "infos/qpos", "infos/qvel")
    arrays = {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    return arrays | {"rewards": arrays["rewards"].astype(np.float32)}, n_episodes


def record_demonstrations(args, out):
    """Write `out`/ENV.hdf5, and `out`/ENV.json with the success rate before failures were left out. The ant needs `out`/walker.pt."""
    env = make_env(args.env_id, horizon=args.horizon, seed=(args.seed, 38))
    controller, how, step = push, "a scripted controller", 0
    if isinstance(env.unwrapped, AntMaze):
        if not (out / "walker.pt").exists():
            raise SystemExit(f"{out} holds no walker.pt yet: leave out --record, and training saves one every {args.eval_every} steps")
        saved = torch.load(out / "walker.pt", weights_only=True)
        actor, step = Actor(WALK_DIM, env.action_space, gsde=False), saved["step"]
        actor.load_state_dict(saved["actor"])
        controller, how = walker(actor), f"an ant that SAC taught to walk in {step} steps"
    arrays, n_episodes = record(env, controller, args)
    made_by = (
        f"utils/make_maze_demos.py --env-id {args.env_id} --seed {args.seed} --noise {args.noise:g}, NOT D4RL's data: {how}, along breadth-first waypoints"
    )
    made_by += f"; the {args.n_demos} successes of {n_episodes} episodes"
    path = out / f"{args.env_id}.hdf5"
    attributes = {"env_id": args.env_id, "made_by": made_by, "versions": json.dumps(installed_versions()), "exact_states": True}
    unchecked = path.with_name(f".{path.name}.unchecked.hdf5")
    write_demos(unchecked, arrays, attributes)
    demos = load(unchecked, env)  # which replays some of it
    rate = args.n_demos / n_episodes
    described = {name: value for name, value in describe_run(args).items() if name not in ("out", "record")} | {"exp_name": Path(__file__).stem}
    notes = {"returns": {"0": {"mean": rate, "std": math.sqrt(rate * (1 - rate)), "episodes": n_episodes}}, "walker_steps": step, "args": described}
    write_atomically(out / f"{args.env_id}.json", json.dumps(notes, indent=2) + "\n")
    unchecked.replace(path)  # the last, as its presence says that all is done
    print(f"{path}: {args.n_demos} of {n_episodes} episodes succeeded; {len(demos.rewards)} steps, {demos.lengths.min()} to {demos.lengths.max()} an episode")


def main():
    args = tyro.cli(Args)
    if args.env_id not in MAZE_ENVS:
        raise SystemExit(f"--env-id {args.env_id} is no maze: give one of {', '.join(MAZE_ENVS)}")
    for field in fields(args):
        value, least = getattr(args, field.name), 0 if field.name in ("seed", "learning_starts") else 1
        if field.type is int and value < least:
            raise SystemExit(f"--{field.name.replace('_', '-')} is {value}: give at least {least}")
    out = Path(args.out) if args.out else ROOT / "runs" / "expert" / args.env_id
    out.mkdir(parents=True, exist_ok=True)
    if (out / f"{args.env_id}.hdf5").exists():
        raise SystemExit(f"{out} already holds demonstrations, which are not overwritten: give another --out")
    saved = json.loads((out / "args.json").read_text()) if (out / "args.json").exists() else asdict(args)
    changed = [name for name, value in asdict(args).items() if name not in NOT_OF_THE_WALKER and saved.get(name) != value]
    if changed:
        raise SystemExit(f"the run in {out} was started with another {', '.join(changed)}: give the same, or another --out")
    torch.set_num_threads(1)
    if args.env_id.startswith("antmaze-") and not args.record:
        write_atomically(out / "args.json", json.dumps(asdict(args), indent=2))
        train_walker(args, out)
    record_demonstrations(args, out)


if __name__ == "__main__":
    main()
