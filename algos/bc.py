"""BC: behavioural cloning of the demonstrations' actions, the baseline without any interaction.

The policy's deterministic head is fitted to the expert's actions by least squares, and acts. (Fitting a sampled action instead, as is sometimes done,
is a weaker baseline than it should be.) Read `train` at the end first: it is the algorithm.

    python algos/bc.py --env-id HopperBulletEnv-v0      train on the demonstrations that the repository ships
    python algos/bc.py --demos FILE --env-id ...        train on your own (utils/demos.py describes the format)
    python algos/bc.py --resume runs/RUN                go on with an interrupted run, to the same numbers
    python algos/bc.py --eval runs/RUN                  score the saved policies
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
import tyro
from gymnasium.wrappers import RecordVideo
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from utils.demos import ValidationError, load_split
from utils.envs import MAZE_ENVS, evaluate, make_env

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
    total_gradient_steps: int = 100_000
    """gradient steps of the whole run"""
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

    # Regression
    iteration_gradient_steps: int = 1000
    """gradient steps of an outer iteration"""
    batch_size: int = 256
    """transitions in a gradient step"""
    bc_learning_rate: float = 3e-4
    """learning rate of Adam"""
    standardize: bool | None = None
    """networks see observations in units of the demonstrations' spread (off, as PyBullet scales its own; mazes on)"""

    def __post_init__(self):
        """What is left out takes its value from DEFAULTS, where the mazes differ."""
        for name, (value, in_mazes) in DEFAULTS.items():
            if getattr(self, name) in (None, "auto"):
                setattr(self, name, in_mazes if self.env_id in MAZE_ENVS else value)


# Of flags whose default depends on the task: for all tasks but the mazes, and for them.
DEFAULTS = {
    "p_tremble": (0.1, 0.0),
    "eval_episodes": (10, 25),
    "final_eval_episodes": (10, 100),
    "standardize": (False, True),
}


# ====================================================================================================================================== networks


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
    """A deterministic policy, scale * tanh(u(s)) + bias, in the environment's units. (B, obs_dim) -> (B, action_dim)."""

    def __init__(self, obs_dim, action_space, hidden=256):
        super().__init__()
        self.standardize = Standardize(obs_dim)
        self.hidden = nn.Sequential(self.standardize, nn.Linear(obs_dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.mean = nn.Linear(hidden, action_space.shape[0])
        self.register_buffer("scale", torch.as_tensor((action_space.high - action_space.low) / 2, dtype=torch.float32))
        self.register_buffer("bias", torch.as_tensor((action_space.high + action_space.low) / 2, dtype=torch.float32))

    def forward(self, observations):
        return self.scale * torch.tanh(self.mean(self.hidden(observations))) + self.bias


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


X_AXIS = ("charts/gradient_steps", "gradient steps", "gradient steps")  # the first column of metrics.csv, in words, in a word


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
        load_split(args.demos, env, args.n_demos, args.n_validation_demos)
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
    """Least squares on the expert's actions. Writes logs, checkpoint and policies into `folder`, and goes on where a checkpoint stands."""
    # Evaluating and logging draw from streams of their own, so that they never change training.
    streams = [np.random.SeedSequence((args.seed, stream)) for stream in range(1, 3)]
    torch.manual_seed(int(streams[0].generate_state(1)[0]))  # initial weights
    policy_rng = torch.Generator(args.device).manual_seed(int(streams[1].generate_state(1)[0]))
    env = make_env(args.env_id, p_tremble=args.p_tremble)

    demos, validation_demos, references = load_split(args.demos, env, args.n_demos, args.n_validation_demos)
    observations, actions = torch.as_tensor(demos.observations), torch.as_tensor(demos.actions)
    validation_observations, validation_actions = torch.as_tensor(validation_demos.observations), torch.as_tensor(validation_demos.actions)
    validation_error = ValidationError(validation_demos, env.horizon)

    actor = Actor(env.observation_space.shape[0], env.action_space)
    if args.standardize:
        actor.standardize.fit(observations)
    optimizer = torch.optim.Adam(actor.parameters(), args.bc_learning_rate, fused=True)
    n_iterations = math.ceil(args.total_gradient_steps / args.iteration_gradient_steps)
    counts = {"iteration": 0, "gradient_steps": 0, "best_error": math.inf, "seconds": 0.0}
    parts = {"actor": actor, "optimizer": optimizer, "rngs": Generators(policy_rng)}

    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=args.device, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        counts, references = saved["counts"], saved["references"]
    else:
        random_env, random_rng = make_env(args.env_id, p_tremble=args.p_tremble, seed=(args.seed, 9, 1)), np.random.default_rng((args.seed, 9, 1))
        references["random policy"] = evaluate(random_env, lambda observation: random_env.random_action(random_rng), args.eval_episodes)["return"]
    log = Log(folder, n_kept=counts["iteration"])
    progress = tqdm(total=args.total_gradient_steps, initial=counts["gradient_steps"], unit="step", disable=None)
    progress.write(f"{folder}: " + ", ".join(f"{name} {value:.0f}" for name, value in references.items()))
    started = time.time() - counts["seconds"]

    def loss(observations, actions):
        return ((actor(observations) - actions) / actor.scale).square().mean()

    for iteration in range(counts["iteration"] + 1, n_iterations + 1):
        n_steps = min(args.iteration_gradient_steps, args.total_gradient_steps - counts["gradient_steps"])
        for batch in torch.randint(len(actions), (n_steps, args.batch_size), generator=policy_rng):
            optimizer.zero_grad()
            training_loss = loss(observations[batch], actions[batch])
            training_loss.backward()
            optimizer.step()
        counts["gradient_steps"] += n_steps
        progress.update(n_steps)
        with torch.no_grad():
            validation_loss = loss(validation_observations, validation_actions)

        # ---- Evaluation, and selection of the policy that is returned.
        evaluation = dict.fromkeys(("return", "return_std", "length", "validation_error", *(["success_percent"] if args.env_id in MAZE_ENVS else [])), "")
        if iteration % args.eval_every == 0 or iteration == n_iterations:
            scores, line = evaluate_and_select(args, folder, actor, counts["gradient_steps"], validation_error, counts)
            evaluation |= scores
            progress.write("  ".join([line, f"validation loss {validation_loss:.5f}", *(f"{name} {value:.0f}" for name, value in references.items())]))
        counts["iteration"], counts["seconds"] = iteration, time.time() - started
        log.write(
            {"charts/gradient_steps": counts["gradient_steps"], "charts/seconds": counts["seconds"]}
            | {f"eval/{name}": value for name, value in evaluation.items()}
            | {"losses/training_loss": training_loss.item(), "losses/validation_loss": validation_loss.item()}
        )
        save_atomically(checkpoint, {name: part.state_dict() for name, part in parts.items()} | {"counts": counts, "references": references})
    progress.close()
    log.tensorboard.close()
    plot_learning_curve(folder, references)
    scores = report(args, folder)
    write_atomically(folder / "scores.json", json.dumps(scores | {"references": references}, indent=2))  # its presence says that the run is finished


def report(args, folder):
    """Score the selected and the final policy, on episodes that neither training nor selection has seen. Training ends with this too."""
    env, scores = make_env(args.env_id), {}
    for name, what in (("policy.pt", "selected"), ("final_policy.pt", "final")):
        if not (folder / name).exists():
            raise SystemExit(f"{folder} has no {name} yet: the first is saved after {args.eval_every} outer iterations")
        saved = torch.load(folder / name, map_location=args.device, weights_only=True)
        actor = Actor(env.observation_space.shape[0], env.action_space)
        actor.load_state_dict(saved["actor"])
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
