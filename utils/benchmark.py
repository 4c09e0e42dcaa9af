"""How fast the training loop is, where its time goes, and how that compares with Stable-Baselines3.

    python utils/benchmark.py                                     every script, on every task with shipped demonstrations
    python utils/benchmark.py --scripts filter_br --out speed     one script; writes speed.md (the tables) and speed.json (everything measured) too

What is timed is what runs: each script's own `train`, in a thread that stands still between chunks of interactions, with timers around the functions that it
calls. So two runs take turns in one process (A B A B ...), and a ratio compares neighbours: a load on the machine that comes and goes hits both.

"start" is a fresh run. "later" is one whose buffer and history of roll-outs were filled to `--later` interactions through their own `add`, from the
demonstrations; its networks are as fresh as the other's, and the kept policies of nrmm_dual.py are not filled in. Neither warms up with random actions. A chunk
is an outer iteration of `--interactions`, with an evaluation and a checkpoint; the tables put it together as the script's defaults have it, where both are
rarer. In roll-outs and evaluations a fall does not end the episode, so that they cost the most they can: how long a fresh policy happens to stand says nothing
about speed.

"SB3" is Stable-Baselines3's SAC with filter_br.py's hyperparameters and task, on the true reward: no reward player, no labels, plain Adam, all in its favour.
With alpha 0.5 its episodes start as in the authors' code: a reset replays the recorded actions of a demonstration up to a uniform time.
"""

import importlib.metadata
import importlib.util
import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from utils.demos import load_split
from utils.envs import make_env, set_state

REST, ROLLOUTS, EVALUATION, FILES, RELABEL = "rest of the loop", "roll-outs for f", "evaluation", "logs, checkpoint", "labels of a new f"
POLICY_PLAYER = ("update", "act", "env step", "resets", "labels", REST)  # parts that every interaction pays for; each of the others comes once an iteration
PARTS = (*POLICY_PLAYER, RELABEL, ROLLOUTS, "update of f", FILES, EVALUATION)
EVAL_EPISODES = 2  # of a measured evaluation, whose time is scaled up to the default number
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


@dataclass
class Args:
    scripts: tuple[str, ...] = ("filter_br", "filter_nr", "mm_gail_ipm", "nrmm_dual")
    """files in algos/, without .py"""
    env_ids: tuple[str, ...] = tuple(sorted(path.stem for path in (ROOT / "utils" / "data").glob("*.npz")))
    """tasks; each needs its demonstrations in utils/data"""
    interactions: int = 640
    """interactions in a chunk; a multiple of 64, so that each has as many gradient steps as any other"""
    pairs: int = 3
    """chunks of each of two runs"""
    warmup: int = 2
    """chunks before them that are not counted; 20 of 640 to let Adam's averages decay as in a long run, into denormal numbers where nothing flushes them"""
    later: int = 200_000
    """interactions behind the later run"""
    gsde: bool = False
    """state-dependent exploration noise, on every side"""
    clock: Literal["wall", "processor"] = "wall"
    """"processor" counts the time that this process computes, for a machine that is busy with other work"""
    device: Literal["cpu", "cuda"] = "cpu"
    """of every side; a GPU works on while the script does, so that an update is timed by its launch, and what waits for it pays the rest"""
    torch_threads: int = 1
    """threads of every side"""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """torch's float32 matrix products, of every side"""
    out: str = ""
    """also write OUT.md and OUT.json"""


class Timers:
    """Exclusive times: a moment belongs to the innermost timed call, or to the rest of the loop. Roll-outs and evaluation keep what is inside them."""

    def __init__(self, clock=time.perf_counter):
        self.clock, self.stack, self.seconds, self.since = clock, [REST], defaultdict(float), clock()

    def lap(self):
        now = self.clock()
        self.seconds[self.stack[-1]] += now - self.since
        self.since = now

    def wrap(self, part, function):
        def timed(*args, **kwargs):
            self.lap()
            self.stack.append(self.stack[-1] if self.stack[-1] in (ROLLOUTS, EVALUATION) else part)
            try:
                return function(*args, **kwargs)
            finally:
                self.lap()
                self.stack.pop()

        return timed


class Turns:
    """`loop(tick)` in a thread of its own: it calls `tick` once an interaction, and stands still outside of `chunk`."""

    def __init__(self, loop, timers):
        self.loop, self.timers, self.baton = loop, timers, threading.Barrier(2)
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        self.baton.wait()
        try:
            self.loop(self.tick)
        finally:
            self.baton.abort()  # after an error, which the thread prints: then chunk() raises too

    def tick(self):
        self.left -= 1
        if self.left == 0:
            self.timers.lap()
            self.baton.wait()  # ends a chunk
            self.baton.wait()  # begins the next

    def chunk(self, n):
        """The seconds of the next `n` interactions, by part."""
        self.left = n
        self.timers.lap()
        self.timers.seconds.clear()
        self.baton.wait()
        self.baton.wait()
        return dict(self.timers.seconds)


def load_script(name):
    """A copy of algos/NAME.py's module, for one run alone: its functions are about to be wrapped."""
    spec = importlib.util.spec_from_file_location(f"benchmarked_{name}_{time.perf_counter_ns()}", ROOT / "algos" / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def put_timers(module, timers):
    """Wrap what `module.train` calls. Nothing that it computes changes, but that no fall ends an episode outside of training."""
    for owner, part, names in (
        (module, ROLLOUTS, ("roll_out", "value_under")), (module, EVALUATION, ("evaluate_and_select", "evaluate_mixture")),
        (module, "resets", ("start_episode",)), (module, "update of f", ("update_reward",)), (module, FILES, ("save_atomically",)),
        (module.Log, FILES, ("write",)), (module.SAC, "update", ("update",)), (module.TD3BC, "update", ("update",)),
        (module.GraphedUpdate, "update", ("__call__",)), (module.ReplayBuffer, "update", ("sample",)), (module.ReplayBuffer, FILES, ("state_dict",)),
        (getattr(module, "Rollouts", None), FILES, ("state_dict",)),
    ):  # fmt: skip
        for name in names:
            if hasattr(owner, name):
                setattr(owner, name, timers.wrap(part, getattr(owner, name)))
    label_new, label_all, make_script_env, sampler = timers.wrap("labels", module.label), timers.wrap(RELABEL, module.label), module.make_env, module.sampler
    training_envs = []

    def make_timed_env(*args, **kwargs):
        env = make_script_env(*args, **kwargs)
        env.untimed_step = env.step
        if training_envs:  # train makes its own environment first; this is one for roll-outs or evaluation
            env.step = lambda action: tuple(False if i == 2 else value for i, value in enumerate(env.untimed_step(action)))
        else:
            env.step, env.reset = timers.wrap("env step", env.step), timers.wrap("resets", env.reset)
            training_envs.append(env)
        return env

    module.make_env, module.sampler = make_timed_env, lambda *args: timers.wrap("act", sampler(*args))
    module.label = lambda buffer, f, shift: (label_new if buffer.n_labelled else label_all)(buffer, f, shift)


def fill(module, args, timesteps):
    """Let `module.train` begin with a buffer, and a history of whole-horizon roll-outs, of `timesteps` interactions at the script's defaults."""
    env, defaults = make_env(args.env_id, horizon=args.horizon), module.Args(env_id=args.env_id)
    demos = load_split("", env, args.n_demos, args.n_validation_demos)[0]
    following, pairs = demos.next_observations, np.concatenate([demos.observations, demos.actions], axis=1)
    episodes = [np.resize(pairs, (env.horizon, pairs.shape[1]))] * (timesteps // defaults.iteration_timesteps * defaults.n_rollouts)

    def fill_buffer(buffer):
        if len(buffer.rows) != args.buffer_size:
            return  # it is the demonstrations' own
        for i in np.arange(timesteps) % len(pairs):
            buffer.add(demos.observations[i], demos.actions[i], following[i], demos.terminated[i])

    def made_then(make, add):
        return lambda *args: (part := make(*args), add(part))[0]

    module.ReplayBuffer = made_then(module.ReplayBuffer, fill_buffer)
    if hasattr(module, "Rollouts"):
        module.Rollouts = made_then(module.Rollouts, lambda rollouts: rollouts.add(episodes))


def script_run(args, script, env_id, later=0, **changes):
    """The script's `train`, taking turns, one outer iteration a chunk; `later`: with as many interactions behind it."""
    timers, module = Timers(CLOCKS[args.clock]), load_script(script)
    changes |= {"device": args.device, "gsde": args.gsde, "iteration_timesteps": args.interactions}
    changes |= {"eval_every": 1, "eval_episodes": EVAL_EPISODES, "learning_starts": 0}
    script_args = module.Args(env_id=env_id, total_timesteps=(args.pairs + args.warmup + 100) * args.interactions + 2 * args.later, **changes)
    put_timers(module, timers)

    def loop(tick):
        torch.set_num_threads(args.torch_threads)
        if args.device != "cpu":
            torch.set_default_device(args.device)  # of this thread
        if later:
            fill(module, script_args, later)
        module.tqdm = lambda **_: SimpleNamespace(update=tick, write=lambda line: None)
        module.train(script_args, Path(tempfile.mkdtemp()))

    return Turns(loop, timers)


class ReplayingReset(gym.Wrapper):
    """The authors' expert reset: with probability alpha, from a demonstration's start state, its recorded actions up to a uniformly drawn time."""

    def __init__(self, env, demos, alpha, seed):
        super().__init__(env)
        self.demos, self.alpha, self.rng = demos, alpha, np.random.default_rng(seed)

    def reset(self, **kwargs):
        if self.rng.random() >= self.alpha:
            return self.env.reset()
        episode = self.rng.integers(self.demos.n_episodes)
        first, end = self.demos.episode_starts[episode : episode + 2]
        self.row = self.rng.integers(first, end)
        observation = set_state(self.env, self.demos.states[first])
        p_tremble, self.env.p_tremble = self.env.p_tremble, 0.0  # what was executed then is executed now
        for action in self.demos.executed_actions[first : self.row]:
            observation = self.env.step(action)[0]
        self.env.p_tremble = p_tremble
        return observation, {}


def sb3_run(args, env_id, alpha):
    """Stable-Baselines3's SAC, taking turns, with the hyperparameters of filter_br.py."""
    from stable_baselines3 import SAC
    from stable_baselines3.common.callbacks import ConvertCallback

    ours = load_script("filter_br").Args(env_id=env_id, learner="sac")
    same = {name: getattr(ours, name) for name in ("buffer_size", "batch_size", "gamma", "tau", "train_freq", "gradient_steps")} | {"device": args.device}
    network = {"net_arch": [256, 256]} | ({"log_std_init": -3.0} if args.gsde else {})

    def loop(tick):
        torch.set_num_threads(args.torch_threads)
        env = make_env(env_id, p_tremble=ours.p_tremble, seed=1)
        env = ReplayingReset(env, load_split("", env, ours.n_demos, ours.n_validation_demos)[0], alpha, seed=1)
        sac = SAC("MlpPolicy", env, lambda left: left * ours.learning_rate, learning_starts=0, use_sde=args.gsde, policy_kwargs=network, **same)
        sac.learn((args.pairs + args.warmup + 100) * args.interactions + 2 * args.later, ConvertCallback(lambda local, _: tick() or True))

    return Turns(loop, Timers(CLOCKS[args.clock]))


def products_per_second(clock, device, n=20):
    """Updates a second if one were nothing but its 16 products of 256 x 256 x 256: with a batch of 256, SAC's hidden layers, there and back.

    Forward the policy at s' and s, the two target Q-functions at s', the two Q-functions at both actions at s; backward (two products a layer) the Q-functions'
    loss and the policy's, the latter also through the Q-functions' inputs (one product a layer).
    """
    a, b = torch.randn(2, 256, 256, device=device)
    out, began = torch.empty_like(a), clock()
    for _ in range(16 * n):
        torch.mm(a, b, out=out)
    out.sum().item()  # waits for a GPU
    return n / (clock() - began)


def measure(args, folder, script, env_id, alpha=None):
    """Two runs in turns: start and later or, with `alpha`, SB3 and the script. Seconds of an outer iteration at the script's defaults, by part and chunk."""
    torch.set_num_threads(args.torch_threads)
    torch.set_float32_matmul_precision(args.matmul_precision)
    tempfile.tempdir = folder
    if alpha is None:
        runs = {"start": script_run(args, script, env_id), "later": script_run(args, script, env_id, args.later)}
    else:
        runs = {"SB3": sb3_run(args, env_id, alpha), script: script_run(args, script, env_id, alpha=alpha)}
    defaults = load_script(script).Args(env_id=env_id)
    often = dict.fromkeys(POLICY_PLAYER, defaults.iteration_timesteps / args.interactions)
    often[EVALUATION] = defaults.eval_episodes / EVAL_EPISODES / defaults.eval_every
    chunks, peaks, products = {name: [] for name in runs}, [], []
    for run in runs.values():
        for _ in range(args.warmup):  # the second has all parts in it
            run.chunk(args.interactions)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10))
    for _ in range(args.pairs):
        for name, run in runs.items():
            seconds = run.chunk(args.interactions)
            chunks[name].append({part: seconds.get(part, 0.0) * often.get(part, 1.0) for part in PARTS})
        products.append(products_per_second(CLOCKS[args.clock], args.device))
    case = {"case": script if alpha is None else f"alpha {alpha:g}", "task": env_id, "peak_mib": peaks, "products": products}
    return case | {"iteration": defaults.iteration_timesteps, "chunks": chunks}


def table(header, rows):
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))


def report(cases, about):
    """Two Markdown tables: speed, and where the time goes."""

    def spread(values, digits):
        return "{:.{d}f} ({:.{d}f} to {:.{d}f})".format(statistics.median(values), min(values), max(values), d=digits)

    speed, shares = [], []
    for case in cases:
        (a, first), (b, second) = case["chunks"].items()
        rates = {parts: [[case["iteration"] / sum(c[p] for p in parts) for c in run] for run in (first, second)] for parts in (PARTS, POLICY_PLAYER)}
        ratios = [spread([y / x for x, y in zip(*rates[parts], strict=True)], 2) for parts in (PARTS, POLICY_PLAYER)]
        speed.append([case["case"], case["task"], f"{a}, {b}", *(spread(run, 0) for run in rates[PARTS]), *ratios, spread(case["products"], 0)])
        speed[-1] += [f"{m:.0f}" for m in case["peak_mib"]]
        for name, run in case["chunks"].items():
            seconds = [statistics.median(chunk[part] for chunk in run) for part in PARTS]
            shares += [[case["case"], case["task"], name, *(f"{100 * s / sum(seconds):.1f}" for s in seconds)]] if name != "SB3" else []
    header = ["case", "task", "A, B", "A: interactions/s", "B", "B/A", "B/A, policy player alone", "an update's products alone: /s", "peak MiB: A", "A and B"]
    text = f"Median (range) over chunks in turns. {about}", table(header, speed), "Time in %, medians:", table(["case", "task", "run", *PARTS], shares)
    return "\n\n".join(text)


def main():
    args = tyro.cli(Args)
    if args.interactions < 64 or args.interactions % 64:
        raise SystemExit(f"--interactions is {args.interactions}: give a multiple of 64")
    if args.pairs < 1:
        raise SystemExit(f"--pairs is {args.pairs}: give at least 1")
    with_demos = sorted(path.stem for path in (ROOT / "utils" / "data").iterdir() if path.suffix in (".npz", ".hdf5"))
    for flag, given, known in (("--scripts", args.scripts, Args.scripts), ("--env-ids", args.env_ids, with_demos)):
        if unknown := [name for name in given if name not in known]:
            raise SystemExit(f"{flag} {unknown[0]}: give some of {', '.join(known)}")
    if args.out and (there := [path for path in (Path(f"{args.out}.md"), Path(f"{args.out}.json")) if path.exists()]):
        raise SystemExit(f"{there[0]} is there already, and is not overwritten: give another --out")
    if args.out:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    jobs, versions = [(script, env_id) for env_id in args.env_ids for script in args.scripts], {}
    try:
        versions["stable_baselines3"] = importlib.metadata.version("stable_baselines3")
        jobs += [("filter_br", "HopperBulletEnv-v0", alpha) for alpha in (0.0, 0.5)]
    except importlib.metadata.PackageNotFoundError:
        print("no comparison with Stable-Baselines3, which is not installed: pip install stable-baselines3")
    run = load_script("filter_br").describe_run(args)
    about, cases = f"{run['machine']}; " + ", ".join(f"{name} {version}" for name, version in (run["versions"] | versions).items()), []
    for job in jobs:
        # A process each, for a peak of memory of its own.
        with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(1) as pool:
            cases.append(pool.apply(measure, (args, folder, *job)))
        print(report(cases[-1:], about), end="\n\n", flush=True)
        if args.out:
            Path(f"{args.out}.md").write_text(report(cases, about) + "\n")
            Path(f"{args.out}.json").write_text(json.dumps({"about": about, "args": asdict(args), "cases": cases}, indent=2))
    print(report(cases, about))


if __name__ == "__main__":
    main()
