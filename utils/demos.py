"""Demonstrations: one .npz format, recorded, saved, loaded and checked here.

    python utils/demos.py inspect FILE    # episodes, lengths, returns, ranges, versions, who made it
    python utils/demos.py verify FILE     # restores every state, applies the recorded action, prints the greatest error and where

A file holds N steps of E episodes, one after the other, as flat arrays of numbers and strings (no object arrays, so nothing is ever unpickled):

    observations        (N, d) float32     what the policy saw before step i, raw (never normalised)
    actions             (N, k) float32     what the policy intended at step i; (N,) int64 for a discrete task
    rewards             (N,) float64       the true reward of step i: for reports, never for learning
    terminated          (N,) bool          the task ended the episode at step i
    truncated           (N,) bool          the horizon ended it. The last row of an episode, and no other, has one of the two or both
    final_observations  (E, d) float32     the observation after the last step of each episode
    episode_starts      (E + 1,) int64     episode e is rows episode_starts[e] to episode_starts[e + 1] - 1: the first entry is 0, the last N
    env_id              string
  and, where known:
    states              (N, m) float64     utils.envs.get_state before step i: the time step first. Without them there are no expert resets
    executed_actions    as actions         what the environment executed (trembling hand); left out: the same as `actions`
    reset_seeds         (E,) int64         the seed that each episode was reset with; -1: unknown
    p_tremble           float64            of the environment that they were recorded in; left out: 0
    made_by, versions   strings            who or what made it; a JSON object of versions

Next observations are the next row's, or `final_observations` at an episode's end: to store those E rows alone halves the price of observations, and
still never joins two episodes. To keep files small, a state's last d entries are left out where they only repeat the observation, as PyBullet's do;
the file then says `states_end_with_observation` = True. Other number types are converted on loading, float64 to float32 among them.

Two other sources are read into the same arrays: D4RL's maze files (FILE.hdf5, or d4rl:antmaze-large-play-v2; see utils/d4rl.py), and Minari's ids.
`ValidationError` says how far a policy's episodes are from demonstrations that were held out.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import re
import sys
import warnings
import zipfile
import zlib
from pathlib import Path

import gymnasium as gym
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from utils import d4rl
from utils.envs import MAZE_ENVS, get_state, make_env, set_state

# On the machine that recorded it, a restored step gives the recorded numbers to the bit. Another CPU or build may round differently: up to this
# error, relative to max(1, |recorded|), which is the last digit or two of a float32, a file is accepted with a warning.
TOLERANCE = 1e-6
# The same for the median step of data whose states are not exact; their rewards and endings, which may follow other rules, are not compared. Measured on the
# ant: 2e-7 for states in single precision without the solver's warm start, but 0.18 and more for torques a tenth too small or contact margins that add up,
# and 0.4 and more for a mirrored frame, gymnasium's torques or another time step.
INEXACT_TOLERANCE = 0.1
# Steps that load() replays, in 0.2 s. A fault in 1.5 % of all steps (what a physics engine's contact cache does) goes unseen once in 20 files.
CHECKED_STEPS = 200

TYPES = {"observations": np.float32, "actions": None, "executed_actions": None, "rewards": np.float64, "terminated": bool, "truncated": bool}
TYPES |= {"states": np.float64, "final_observations": np.float32, "reset_seeds": np.int64, "episode_starts": np.int64}
PER_STEP = ("observations", "actions", "executed_actions", "rewards", "terminated", "truncated", "states")
PER_EPISODE = ("final_observations", "reset_seeds")


class DemosError(ValueError):
    """Demonstrations that must not be trained on. One sentence: which file, where in it or which flag, and what to do."""

    def __init__(self, source, sentence):
        super().__init__(f"{source}: {sentence}")


@dataclasses.dataclass
class Demos:
    """Demonstrations in memory: the arrays of the file format, in its types, with nothing left out but `states`, which is None in foreign data."""

    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    final_observations: np.ndarray
    episode_starts: np.ndarray
    env_id: str
    states: np.ndarray | None = None
    executed_actions: np.ndarray | None = None
    reset_seeds: np.ndarray | None = None
    p_tremble: float = 0.0
    made_by: str = "unknown"
    versions: str = "{}"
    exact_states: bool = True  # False: a restored step may differ from the recorded one beyond rounding, as in D4RL's own files
    notes: str = ""  # what reading a foreign format had to decide

    def __post_init__(self):
        if self.executed_actions is None:
            self.executed_actions = self.actions
        if self.reset_seeds is None:
            self.reset_seeds = np.full(max(np.size(self.episode_starts) - 1, 0), -1)
        action_type = np.int64 if np.asarray(self.actions).dtype.kind in "iu" else np.float32
        for name, dtype in TYPES.items():
            if (given := getattr(self, name)) is not None:
                setattr(self, name, np.ascontiguousarray(given, dtype=dtype or action_type))
                if dtype in (bool, np.int64) and not np.array_equal(getattr(self, name), given):
                    raise ValueError(f"{name} has to be {np.dtype(dtype).name}, and has other numbers")
        self.env_id, self.made_by, self.versions, self.p_tremble = str(self.env_id), str(self.made_by), str(self.versions), float(self.p_tremble)
        self.exact_states, self.notes = bool(self.exact_states), str(self.notes)
        dict(json.loads(self.versions))  # raises ValueError or TypeError here rather than where it is shown

    @property
    def n_episodes(self):
        return len(self.episode_starts) - 1

    @property
    def lengths(self):
        """(E,) int64: steps of each episode."""
        return np.diff(self.episode_starts)

    @property
    def returns(self):
        """(E,) float64: true return of each episode, undiscounted."""
        return np.add.reduceat(self.rewards, self.episode_starts[:-1])

    @property
    def next_observations(self):
        """(N, d) float32: the observation after each step; at an episode's end its final one, never the next episode's first."""
        following = np.roll(self.observations, -1, axis=0)
        following[self.episode_starts[1:] - 1] = self.final_observations
        return following

    def where(self, row):
        """'row 1234 (episode 1, step 234)', for messages."""
        episode = np.searchsorted(self.episode_starts, row, side="right") - 1
        return f"row {row} (episode {episode}, step {row - self.episode_starts[episode]})"

    def subset(self, episodes):
        """Demos of these episodes (a sequence of indices), in the given order."""
        episodes = np.asarray(episodes, dtype=np.int64)
        rows = np.concatenate([np.arange(self.episode_starts[e], self.episode_starts[e + 1]) for e in episodes])
        picked = {name: getattr(self, name)[rows] for name in PER_STEP if getattr(self, name) is not None}
        picked |= {name: getattr(self, name)[episodes] for name in PER_EPISODE}
        return dataclasses.replace(self, **picked, episode_starts=np.cumsum([0, *self.lengths[episodes]]))

    def cut(self, horizon):
        """Demos of the first `horizon` steps of each episode; one that is cut ends truncated, with the next row's observation as its last."""
        steps, long = np.arange(len(self.rewards)) - np.repeat(self.episode_starts[:-1], self.lengths), self.lengths > horizon
        kept, final_observations = steps < horizon, self.final_observations.copy()
        final_observations[long] = self.observations[self.episode_starts[:-1][long] + horizon]
        cut = {name: getattr(self, name)[kept] for name in PER_STEP if getattr(self, name) is not None}
        cut["truncated"] |= (np.repeat(long, self.lengths) & (steps == horizon - 1))[kept]
        episode_starts = np.cumsum([0, *np.minimum(self.lengths, horizon)])
        return dataclasses.replace(self, **cut, final_observations=final_observations, episode_starts=episode_starts)

    def need_states(self, source, flag):
        """Raises DemosError where there are no states. `flag` is what asks for them, such as "--alpha 0.5"."""
        if self.states is None:
            sentence = f"has no simulator states, and {flag} resets the simulator to them (observations leave out much of what decides the future)"
            others = "use algos/mm_gail_ipm.py (FILTER with alpha 0) or algos/bc.py, which work without resets, or " if flag.startswith("--") else ""
            raise DemosError(source, f"{sentence}: {others}record with utils/demos.py")


def installed_versions():
    """The versions here of what decides a simulation's numbers: name -> version."""
    versions = {"python": platform.python_version(), "machine": platform.machine()}
    for package in ("numpy", "gymnasium", "pybullet", "pybullet-envs-gymnasium", "mujoco"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return versions


def record(env, policy, n_episodes, made_by):
    """Demos of `n_episodes` whole episodes of policy(observation) -> action in `env` (from utils.envs.make_env), from its own start states.

    Raises DemosError at the first action that is not in the environment's action space.
    """
    rows = {name: [] for name in PER_STEP}
    final_observations, reset_seeds, episode_starts = [], [], [0]
    for _ in range(n_episodes):
        observation, info = env.reset()
        reset_seeds.append(info["seed"])
        done = False
        while not done:
            state, action = get_state(env), np.asarray(policy(observation))
            if isinstance(env.action_space, gym.spaces.Box):
                action = action.astype(env.action_space.dtype)
            if not env.action_space.contains(action):
                raise DemosError("recording", f"the policy's action {action} in step {env.t} of episode {len(episode_starts) - 1} is not in {env.action_space}")
            next_observation, reward, terminated, truncated, info = env.step(action)
            step = (observation, action, info["executed_action"], reward, terminated, truncated, state)
            for values, value in zip(rows.values(), step, strict=True):
                values.append(np.array(value))
            observation, done = next_observation, terminated or truncated
        final_observations.append(np.array(observation))
        episode_starts.append(len(rows["rewards"]))
    demos = Demos(
        **rows,
        final_observations=final_observations,
        reset_seeds=reset_seeds,
        episode_starts=episode_starts,
        env_id=env.unwrapped.spec.id,
        p_tremble=env.p_tremble,
        made_by=made_by,
        versions=json.dumps(installed_versions()),
    )
    check_arrays(demos, "recorded demonstrations")
    check_fits(demos, env, "recorded demonstrations")
    return demos


def save(path, demos):
    """Write `demos` to `path`, whole or not at all. Raises DemosError where the file exists, or `read` would refuse it."""
    path = Path(path)
    if path.exists():
        raise DemosError(path, "exists and is not overwritten: delete it or choose another name")
    check_arrays(demos, path)
    arrays = {name: value for name, value in vars(demos).items() if value is not None}
    if np.array_equal(demos.executed_actions, demos.actions):
        del arrays["executed_actions"]
    d = demos.observations.shape[1]
    if demos.states is not None and np.array_equal(demos.states[:, -d:], demos.observations):
        arrays |= {"states": demos.states[:, :-d], "states_end_with_observation": True}
    arrays = {name: np.asarray(value, order="F") for name, value in arrays.items()}  # column by column compresses a tenth better
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(unfinished, "wb") as file:
            np.savez_compressed(file, **arrays)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def load(source, env, n_demos=None, check_dynamics=True):
    """The first `n_demos` (None: all) demonstrations of `source` (see `read`), checked against the `env` in which they will be used.

    Where there are states, some steps are replayed in `env`. Its generators do not move, but it ends elsewhere: reset it before use.
    Raises DemosError, in one sentence, before anything is trained.
    """
    demos = read(source, env.unwrapped.spec.id)
    if not demos.exact_states and demos.lengths.max() > env.horizon:  # D4RL's roll-outs go on for 1001 rows, unless they succeed
        n_cut = np.maximum(demos.lengths - env.horizon, 0).sum()
        warnings.warn(f"{source}: {n_cut} of {len(demos.rewards)} rows lie past the horizon of {env.horizon} steps and are left out", stacklevel=2)
        demos = demos.cut(env.horizon)
    check_fits(demos, env, source)
    if n_demos is not None:
        if not 1 <= n_demos <= demos.n_episodes:
            raise DemosError(source, f"holds {demos.n_episodes} demonstrations and --n-demos asks for {n_demos}: give 1 to {demos.n_episodes}")
        demos = demos.subset(range(n_demos))
    if check_dynamics and demos.states is not None:
        n_steps = len(demos.rewards)
        worst, sentence = check_replay(demos, env, np.random.default_rng(0).permutation(n_steps)[:CHECKED_STEPS], source)
        if worst > 0:
            warnings.warn(f"{source}: {sentence}", stacklevel=2)
    return demos


def load_split(source, env, n_demos, n_validation_demos, evaluation_env=None):
    """What a training script needs: Demos to train on (the first in the file), Demos to select the policy by (the last), and known returns.

    An empty `source` means the demonstrations shipped for the task. The returns are {name: mean return}: of the demonstrations, or where utils/train_expert.py
    has noted it beside the file (.json), of their expert in an environment that trembles like `env`. Those to select by are whole up to the horizon of
    `evaluation_env`, where policies are scored, if it is another than that of `env`, where they are trained. Warns of those that stop before the horizon
    without an end. Raises DemosError.
    """
    shipped = Path(__file__).parent / "data" / f"{env.unwrapped.spec.id}.npz"
    path = source or (shipped.with_suffix(".hdf5") if shipped.with_suffix(".hdf5").exists() else shipped)
    demos = load(path, env)
    if min(n_demos, n_validation_demos) < 1 or demos.n_episodes < n_demos + n_validation_demos:
        asked = f"of which --n-demos {n_demos} and --n-validation-demos {n_validation_demos} take {n_demos + n_validation_demos}"
        raise DemosError(path, f"holds {demos.n_episodes} demonstrations, {asked}: give at least 1 each, and no more than it holds")
    whole = load(path, evaluation_env, check_dynamics=False) if evaluation_env and evaluation_env.horizon != env.horizon else demos
    returns = whole.returns if demos.env_id not in MAZE_ENVS else whole.terminated[whole.episode_starts[1:] - 1]  # D4RL's rewards are by another goal
    references = {f"demonstrations (p_tremble {demos.p_tremble:g})": float(returns.mean())}
    notes = Path(path).with_suffix(".json")
    try:
        if notes.exists() and (measured := json.loads(notes.read_text()).get("returns", {}).get(f"{env.p_tremble:g}")):
            references = {f"expert (p_tremble {env.p_tremble:g})": float(measured["mean"])}
    except (ValueError, TypeError, AttributeError, KeyError):
        raise DemosError(notes, "is not the notes that utils/train_expert.py writes beside demonstrations: rename or move it") from None
    demos, held_out = demos.subset(range(n_demos)), whole.subset(range(demos.n_episodes - n_validation_demos, demos.n_episodes))
    for some, horizon, what, who, instead in (
        (demos, env.horizon, "train on", "--payoff sum", "leave that out"),
        (held_out, (evaluation_env or env).horizon, "select by", "the validation error", "use final_policy.pt"),
    ):
        n_cut_off = ((some.lengths < horizon - 1) & some.truncated[some.episode_starts[1:] - 1]).sum()  # one step is what reading D4RL's data may leave out
        if n_cut_off:
            fault = f"of {some.n_episodes} demonstrations to {what} {n_cut_off} stop before the horizon of {horizon} steps"
            warnings.warn(f"{path}: {fault}; {who} takes that for an early end: record whole episodes, or {instead}", stacklevel=1)
    return demos, held_out, references


class ValidationError:
    """Moment-matching error against held-out demonstrations, over a fixed reward class: the unit ball spanned by 512 random Fourier features of (s, a).

    sup_f (E_expert[sum_t f] - E_pi[sum_t f]) / T is then the norm of the difference of the mean features. Fixed, so that the errors of different
    iterations, seeds and algorithms compare; it never looks at the true reward. One feature more is 1 on the steps that an episode which ended early lacks:
    else a policy that falls at once, with no moments at all, would be nearer to the expert than one that stands where the expert never is.
    """

    def __init__(self, demos, horizon, n_features=512):
        pairs, rng = np.concatenate([demos.observations, demos.actions], axis=1), np.random.default_rng(8)
        self.center, self.spread = pairs.mean(0), np.maximum(pairs.std(0), 0.1)
        self.frequencies = rng.normal(size=(pairs.shape[1], n_features)) / math.sqrt(pairs.shape[1])
        self.phases = rng.uniform(0, 2 * math.pi, n_features)
        self.horizon = horizon
        self.expert_moments = self.moments(pairs, demos.n_episodes)

    def moments(self, pairs, n_episodes):
        """(n_features + 1,): E[sum_t phi(s_t, a_t)] / T, and the mean share of the horizon after the end of the episode."""
        standard = (pairs - self.center) / self.spread
        features = np.cos(standard @ self.frequencies + self.phases) * math.sqrt(2 / len(self.phases))
        all_steps = self.horizon * n_episodes
        return np.append(features.sum(0), all_steps - len(features)) / all_steps

    def __call__(self, episodes):
        return float(np.linalg.norm(self.expert_moments - self.moments(np.concatenate(episodes), len(episodes))))


def read(source, env_id=""):
    """Demos from a path, from a Minari id such as "mujoco/hopper/expert-v0", or D4RL's as "d4rl:antmaze-large-play-v2". Raises DemosError.

    They are checked for all that needs no environment. `env_id` is the task of data sets that do not say theirs.
    """
    minari_id = re.fullmatch(r"(?:minari:)?((?:[\w-]+/)*[\w-]+-v\d+)", str(source))
    if str(source).startswith("d4rl:") or Path(source).suffix in (".hdf5", ".h5"):
        demos = from_d4rl(str(source), env_id)
    elif minari_id and not Path(source).exists():
        demos = from_minari(minari_id[1], source, env_id)
    else:
        demos = from_file(Path(source))
    check_arrays(demos, source)
    return demos


def from_d4rl(source, env_id):
    """Demos from a file of D4RL's mazes, which is fetched if `source` is d4rl:ID and it is not in D4RL's cache."""
    is_id = source.startswith("d4rl:")
    try:
        fields = d4rl.read_demos(d4rl.locate(source[5:]) if is_id else Path(source))
        demos = Demos(**fields | {"env_id": source[5:] if is_id else fields["env_id"] or env_id or "unknown"})
    except (ValueError, TypeError) as error:
        raise DemosError(source, error) from error
    if "WARNING" in demos.notes:
        warnings.warn(f"{source}: {demos.notes}", stacklevel=4)
    return demos


def from_file(path):
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise DemosError(path, "no such file: give --demos an .npz or .hdf5 file, d4rl:ID or a Minari id") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise DemosError(path, f"cannot be read, it is truncated or damaged ({error}): copy or record it again") from error
    except (ValueError, TypeError, AttributeError) as error:  # the last from an .npy, before Python 3.11
        sentence = "is not an .npz of plain arrays (pickled content can run code and is never loaded): write it with utils/demos.py"
        raise DemosError(path, sentence) from error
    fields = dataclasses.fields(Demos)
    missing = [field.name for field in fields if field.default is dataclasses.MISSING and field.name not in arrays]
    if missing:
        raise DemosError(path, f"lacks {', '.join(missing)}: write it with utils/demos.py, which describes the format")
    try:
        if arrays.get("states_end_with_observation", False):
            arrays["states"] = np.hstack([arrays["states"], arrays["observations"]])
        return Demos(**{field.name: arrays[field.name] for field in fields if field.name in arrays})
    except (KeyError, ValueError, TypeError) as error:
        raise DemosError(path, f"holds something of the wrong kind ({error}): write it with utils/demos.py, which describes the format") from error


def from_minari(dataset_id, source, env_id):
    """Demos from a Minari data set, downloaded if need be. These have no simulator states."""
    try:
        import minari
    except ImportError:
        raise DemosError(source, 'no such file, and to load it as a Minari data set do: pip install "minari[hf,hdf5]"') from None
    try:
        dataset = minari.load_dataset(dataset_id, download=True)
        episodes = list(dataset.iterate_episodes())
    except Exception as error:  # whatever its network and file layers raise
        raise DemosError(source, f"Minari cannot load it ({error}): `minari list remote` shows the ids") from error
    for i, episode in enumerate(episodes):
        if not isinstance(episode.observations, np.ndarray) or len(episode.observations) != len(episode.actions) + 1:
            raise DemosError(source, f"episode {i} lacks a flat observation of every step and of its end: choose a data set that has them")
    episode_starts = np.cumsum([0] + [len(episode.actions) for episode in episodes])
    flat = {name: np.concatenate([getattr(episode, name) for episode in episodes]) for name in ("actions", "rewards", "terminations", "truncations")}
    # Where the collector stopped in mid-episode the data set marks no end: to a learner that is a truncation.
    flat["truncations"][episode_starts[1:] - 1] |= ~flat["terminations"][episode_starts[1:] - 1]
    return Demos(
        observations=np.concatenate([episode.observations[:-1] for episode in episodes]),
        actions=flat["actions"],
        rewards=flat["rewards"],
        terminated=flat["terminations"],
        truncated=flat["truncations"],
        final_observations=[episode.observations[-1] for episode in episodes],
        episode_starts=episode_starts,
        env_id=dataset.env_spec.id if dataset.env_spec else env_id or "unknown",
        made_by=f"Minari data set {dataset_id}",
    )


def check_arrays(demos, source):
    """Raises DemosError unless the arrays are finite and fit together."""
    starts, n_steps, n_episodes = demos.episode_starts, len(demos.observations), demos.n_episodes
    if starts.ndim != 1:
        raise DemosError(source, f"episode_starts has the shape {starts.shape} and needs one dimension: see the format in utils/demos.py")
    if n_steps == 0 or starts.size < 2:
        raise DemosError(source, "holds no demonstrations: record some")
    wrong = np.array([starts[0] != 0, *(np.diff(starts) <= 0)])
    wrong[-1] |= starts[-1] != n_steps
    if wrong.any():
        sentence = f"episode_starts must increase from 0 to the number of steps, {n_steps}, but entry {wrong.argmax()} is {starts[wrong.argmax()]}"
        raise DemosError(source, f"{sentence}: correct it")
    d = demos.observations.reshape(n_steps, -1).shape[1]
    shapes = dict.fromkeys(("rewards", "terminated", "truncated"), (n_steps,)) | {"observations": (n_steps, d)}
    shapes |= {"actions": (n_steps, *demos.actions.shape[1:]), "executed_actions": demos.actions.shape}
    shapes |= {"final_observations": (n_episodes, d), "reset_seeds": (n_episodes,)}
    if demos.states is not None:
        shapes["states"] = (n_steps, max((1, *demos.states.shape[1:])))
    for name, shape in shapes.items():
        value = getattr(demos, name)
        if value.shape != shape:
            raise DemosError(source, f"{name} has the shape {value.shape} and needs {shape}: see the format in utils/demos.py")
        wrong = ~np.isfinite(value.reshape(len(value), -1)).all(axis=1)
        if wrong.any():
            place = demos.where(wrong.argmax()) if name in PER_STEP else f"row {wrong.argmax()}"
            raise DemosError(source, f"{name} has a NaN or an infinity in {place}: leave that episode out or record it again")
    ends = np.isin(np.arange(n_steps), starts[1:] - 1)
    wrong = (demos.terminated | demos.truncated) != ends
    if wrong.any():
        fault = "is the last of its episode but neither" if ends[wrong.argmax()] else "is not the last of its episode but"
        raise DemosError(source, f"{demos.where(wrong.argmax())} {fault} terminated or truncated: correct these flags or episode_starts")
    if demos.states is not None:
        wrong = demos.states[:, 0] != np.arange(n_steps) - np.repeat(starts[:-1], demos.lengths)
        if wrong.any():
            fault = f"the state of {demos.where(wrong.argmax())} says time step {demos.states[wrong.argmax(), 0]:g}"
            raise DemosError(source, f"{fault}: states and actions are out of step, so record them again")


def check_fits(demos, env, source):
    """Raises DemosError unless task, sizes, bounds and horizon are those of `env`, which is reset."""
    env_id, space = env.unwrapped.spec.id, env.action_space
    if demos.env_id != env_id:
        raise DemosError(source, f"was made in {demos.env_id} and not in {env_id}: give --env-id {demos.env_id}, or another --demos")
    discrete = isinstance(space, gym.spaces.Discrete)
    if discrete != (demos.actions.dtype == np.int64):
        raise DemosError(source, f"actions are {demos.actions.dtype} and {env_id} takes {space.dtype}: store them as the environment takes them")
    env.reset(seed=0)  # some need one before they have a state; with a seed given, the stream of start states does not move
    sizes = {"observations": env.observation_space.shape, "actions": space.shape, "states": get_state(env).shape}
    for name, shape in sizes.items():
        value = getattr(demos, name)
        if value is not None and value.shape[1:] != shape:
            raise DemosError(source, f"{name} has the shape {value.shape} and {env_id} has {shape} a step: use data of this version of the task")
    if hasattr(env.unwrapped, "is_free"):
        in_walls = ~env.unwrapped.is_free(demos.observations[:, :2])
        if in_walls.mean() > 0.01:
            fault = f"{in_walls.sum()} of {len(in_walls)} observations are inside the walls of {env_id}, the first in {demos.where(in_walls.argmax())}"
            raise DemosError(source, f"{fault}: use data of this maze, with D4RL's coordinates")
    low, high = (space.start, space.start + space.n - 1) if discrete else (space.low.astype(np.float32), space.high.astype(np.float32))  # as actions are
    for name in ("actions", "executed_actions"):
        values = getattr(demos, name)
        outside = (values < low) | (values > high)
        if outside.any():
            row = np.argwhere(outside)[0][0]
            value, least, most = (np.broadcast_to(x, values.shape)[outside][0] for x in (values, low, high))
            fault = f"{name} has {value:g} in {demos.where(row)}, outside [{least:g}, {most:g}]"
            raise DemosError(source, f"{fault}: clip or rescale the actions as the environment does")
    if demos.lengths.max() > env.horizon:
        fault = f"episode {demos.lengths.argmax()} has {demos.lengths.max()} steps and the horizon is {env.horizon}"
        is_short = env.horizon < (gym.spec(env_id).max_episode_steps or math.inf)  # by a flag: what the task itself has, none makes longer
        remedy = f"give a horizon of at least {demos.lengths.max()}" if is_short else "use data of this task"
        raise DemosError(source, f"{fault}: {remedy}")


def check_replay(demos, env, rows, source, tolerance=TOLERANCE):
    """Restore the state of each of `rows` in `env`, apply the action that was executed there, and compare with the record.

    Errors are relative to max(1, |recorded|). Returns the greatest (0: equal to the bit) and a sentence on it. Raises DemosError above `tolerance`, or where
    states are not exact, if the median row's is above INEXACT_TOLERANCE.
    """
    d, next_observations = demos.observations.shape[1], demos.next_observations
    p_tremble, env.p_tremble = env.p_tremble, 0.0
    errors = np.empty((len(rows), 2 * d + 2))
    for i, row in enumerate(rows):
        restored = set_state(env, demos.states[row])
        observation, reward, terminated, _, _ = env.step(demos.executed_actions[row])
        expected = np.array([*demos.observations[row], *next_observations[row], demos.rewards[row], demos.terminated[row]], dtype=np.float64)
        errors[i] = np.abs(np.array([*restored, *observation, reward, terminated], dtype=np.float64) - expected) / np.maximum(1, np.abs(expected))
    env.p_tremble = p_tremble
    errors[np.isnan(errors)] = np.inf
    if not demos.exact_states:
        errors[:, 2 * d :] = 0  # D4RL flags success by another goal than the row's
    i, column = np.unravel_index(errors.argmax(), errors.shape)
    name = [*(f"restored observation[{j}]" for j in range(d)), *(f"next observation[{j}]" for j in range(d)), "reward", "terminated"][column]
    worst, n_different = errors[i, column], (errors > 0).any(axis=1).sum()
    sentence = f"{len(rows)} of {len(demos.rewards)} steps replayed, {n_different} not equal to the bit, greatest error {worst:.3g}"
    if worst > 0:
        made, here = json.loads(demos.versions), installed_versions()
        changed = [f"{key} {made.get(key)} -> {here.get(key)}" for key in made | here if made.get(key) != here.get(key)]
        sentence += f" in the {name} of {demos.where(rows[i])}; versions then and now: {', '.join(changed) or 'the same'}"
    if not demos.exact_states:
        median = np.median(errors.max(axis=1))
        sentence = f"its states are not exact; {sentence}; the median step's error is {median:.3g}"
    if (worst > tolerance) if demos.exact_states else (median > INEXACT_TOLERANCE):
        raise DemosError(source, f"{demos.env_id} does not reproduce it ({sentence}): record it again here, or install the versions that made it")
    return worst, sentence


def inspect(source):
    """Print what a file or Minari data set holds."""
    demos = read(source)
    n_steps, n_truncated = len(demos.rewards), (demos.truncated & ~demos.terminated).sum()
    trembled = (demos.actions != demos.executed_actions).reshape(n_steps, -1).any(axis=1).sum()
    facts = {
        "file": f"{source}, {Path(source).stat().st_size / 1e6:.2f} MB" if Path(source).exists() else source,
        "environment": f"{demos.env_id}, p_tremble {demos.p_tremble:g}, {trembled} trembled steps",
        "made by": demos.made_by,
        "versions": ", ".join(f"{name} {version}" for name, version in json.loads(demos.versions).items()) or "unknown",
        "episodes": f"{demos.n_episodes} of {n_steps} steps in all, {demos.terminated.sum()} terminated, {n_truncated} truncated",
        "states": "none: no expert resets" if demos.states is None else f"{demos.states.shape[1]} numbers a step{'' if demos.exact_states else ', not exact'}",
    }
    if demos.notes:
        facts["reading it"] = demos.notes
    for name, fact in facts.items():
        print(f"{name:<16}{fact}")
    table = {"length": demos.lengths, "return": demos.returns}
    for name in ("observations", "actions"):
        columns = getattr(demos, name).reshape(n_steps, -1).T
        table |= {f"{name[:-1]}[{i}]": column for i, column in enumerate(columns)}
    print(f"\n{'':<16}{'min':>14}{'mean':>14}{'max':>14}")
    for name, values in table.items():
        constant = "  constant" if "[" in name and values.min() == values.max() else ""
        print(f"{name:<16}{values.min():>14.6g}{values.mean(dtype=np.float64):>14.6g}{values.max():>14.6g}{constant}")


def verify(source, tolerance, env_id=""):
    """Replay every step from its restored state and print the greatest error and where. `env_id`: MODULE:ID of a task that the file knows as ID.

    Raises DemosError above `tolerance`.
    """
    demos = read(source, env_id.rpartition(":")[2])
    demos.need_states(source, "verify")
    env = make_env(env_id or demos.env_id, horizon=int(demos.lengths.max()))
    check_fits(demos, env, source)
    _, sentence = check_replay(demos, env, np.arange(len(demos.rewards)), source, tolerance)
    print(f"{source}: {sentence}")


def main():
    parser = argparse.ArgumentParser(description="Inspect or verify a file of demonstrations.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("inspect", help="episodes, lengths, returns, ranges, versions, who made it").add_argument("file")
    verify_parser = commands.add_parser("verify", help="restore every state, apply the recorded action, print the greatest error and where")
    verify_parser.add_argument("file")
    verify_parser.add_argument("--env-id", default="", help="MODULE:ID of a task of your own, which MODULE registers as ID (default: the file's)")
    verify_parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help="greatest accepted error, relative to max(1, |recorded|), of states that are exact"
    )
    args = parser.parse_args()
    try:
        inspect(args.file) if args.command == "inspect" else verify(args.file, args.tolerance, args.env_id)
    except ValueError as error:  # of the demonstrations (DemosError) or of their environment
        sys.exit(str(error))


if __name__ == "__main__":
    main()
