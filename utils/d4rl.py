"""D4RL's maze data: its HDF5 files read, found or fetched, and written.

    python utils/demos.py inspect d4rl:antmaze-large-play-v2          D4RL's own file, fetched if need be
    python algos/filter_br.py --env-id antmaze-large-play-v2 --demos FILE.hdf5          any file in D4RL's format

D4RL's files are looked for in $D4RL_DATASET_DIR (default ~/.d4rl/datasets), as the d4rl package does. A file holds N rows of roll-outs, one after the other:

    observations    (N, d) float32     positions and velocities before row i: 29 for the ant, 4 for the ball. The goal is not among them
    actions         (N, k) float32     in [-1, 1]
    rewards         (N,) float32       1 near the goal of the evaluation
    terminals       (N,) bool          the same: see below
    timeouts        (N,) bool          the roll-out ends here
    infos/goal      (N, 2) float32     the goal that row i heads for
  and, where known:
    infos/qpos, infos/qvel  (N, nq), (N, nv) float32     positions and velocities *after* row i

The traps, and what is done about them:
  - D4RL's roll-outs go on after success, and every row near one fixed goal is flagged terminal. Splitting there gives thousands of episodes of one row. So
    `timeouts` end episodes, and a terminal row does only if the robot was put elsewhere after it. But the first row that reaches the goal that it heads for
    ends its episode, terminated, as in the task: else a policy that succeeds would seem to end early. What follows up to the timeout is left out.
  - The end of a roll-out lacks its last observation. It is taken from infos/qpos and infos/qvel where these hold what came after a row, which the rows inside
    a roll-out tell. Where they do not, the last row of each roll-out is left out, and its observation serves as the last one.
  - The goal of a row is that row's, whichever rows are left out; it is appended to the observation.
  - In D4RL's v0 files, `timeouts` are out of step and the ant jumps across the maze inside a roll-out. An episode ends at such a jump, with a warning.
  - A state is an observation: single precision, without the contact solver's warm start. A restored step then differs from the recorded one in the last digits,
    as it does for D4RL's files (`exact_states` False), unless it was recorded from states rounded likewise, as utils/make_maze_demos.py does.
"""

import hashlib
import http.client
import os
import sys
import urllib.request
from pathlib import Path

import numpy as np

ADDRESS = "http://rail.eecs.berkeley.edu/datasets/offline_rl/ant_maze_v2/"
# Name, size in bytes and SHA-256, the last two from the checksum list of TensorFlow Datasets; None: not known here.
FILES = {
    "antmaze-umaze-v2": ("Ant_maze_u-maze_noisy_multistart_False_multigoal_False_sparse_fixed.hdf5", None, None),
    "antmaze-umaze-diverse-v2": ("Ant_maze_u-maze_noisy_multistart_True_multigoal_True_sparse_fixed.hdf5", None, None),
    "antmaze-medium-play-v2": ("Ant_maze_big-maze_noisy_multistart_True_multigoal_False_sparse_fixed.hdf5", None, None),
    "antmaze-medium-diverse-v2": ("Ant_maze_big-maze_noisy_multistart_True_multigoal_True_sparse_fixed.hdf5", None, None),
    "antmaze-large-play-v2": (
        "Ant_maze_hardest-maze_noisy_multistart_True_multigoal_False_sparse_fixed.hdf5",
        230_880_653,
        "6d353df2457829925d7f9d4b0215587469908bd57478ea76f16417cfa944f471",
    ),
    "antmaze-large-diverse-v2": (
        "Ant_maze_hardest-maze_noisy_multistart_True_multigoal_True_sparse_fixed.hdf5",
        231_183_710,
        "84f775eb7956ea9cc766704710dc520a8ab357adc7522ade47f556f0e335e284",
    ),
}
# Metres: from the goal, where the task ends in success; and between two rows, what no robot can walk in the 0.1 s of a step.
GOAL_RADIUS, JUMP = 0.5, 1.5


def locate(dataset_id):
    """The path of D4RL's file for this task, fetched if it is not in the cache, with the size and checksum that it should have.

    Raises ValueError, in one sentence, for an unknown id, a file that is not D4RL's, or one that cannot be fetched.
    """
    if dataset_id not in FILES:
        raise ValueError(f"D4RL has no such maze data set: known are {', '.join(FILES)}")
    name, size, sha256 = FILES[dataset_id]
    path = Path(os.environ.get("D4RL_DATASET_DIR", "~/.d4rl/datasets")).expanduser() / name
    by_hand = f"fetch {ADDRESS}{name} by hand and put it at {path}"
    if not path.exists():
        if sha256 is None:
            raise ValueError(f"{path} is not there, and is not fetched because its checksum is not known here: {by_hand}")
        fetch(ADDRESS + name, path, size, sha256, by_hand)
    elif sha256 is not None:
        with open(path, "rb") as file:
            sha = hashlib.sha256()
            while block := file.read(2**20):
                sha.update(block)
        fault = difference(path.stat().st_size, sha, size, sha256)
        if fault:
            raise ValueError(f"{path} is not D4RL's file, or only a part of it ({fault}): delete it, and the next start fetches it")
    return path


def difference(found_size, sha, size, sha256):
    """What is wrong with a file of this size and checksum, or ""."""
    if found_size != size:
        return f"{found_size} bytes instead of {size}"
    return "" if sha.hexdigest() == sha256 else f"its SHA-256 is {sha.hexdigest()} instead of {sha256}"


def fetch(address, path, size, sha256, by_hand):
    """Download `address` to `path`, whole and as it should be, or not at all. Raises ValueError, whose remedy is `by_hand`."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    print(f"fetching {address} ({size / 1e6:.0f} MB) to {path}", file=sys.stderr)
    sha, found_size = hashlib.sha256(), 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(address, timeout=60) as response, open(unfinished, "wb") as file:
            while block := response.read(2**20):
                found_size += file.write(block)
                sha.update(block)
        if fault := difference(found_size, sha, size, sha256):
            raise OSError(fault)
        os.replace(unfinished, path)
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(f"the download of {path.name} failed ({error}): {by_hand}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def read_arrays(path):
    """The file's arrays by name, and its attributes. Raises ValueError, in one sentence."""
    try:
        import h5py
    except ImportError:
        raise ValueError("D4RL's files need a package that is not installed: pip install h5py") from None
    names = ("observations", "actions", "rewards", "terminals", "timeouts", "infos/goal")
    try:
        with h5py.File(path, "r") as file:
            arrays = {name: file[name][()] for name in (*names, "infos/qpos", "infos/qvel") if isinstance(file.get(name), h5py.Dataset)}
            attributes = dict(file.attrs)
    except FileNotFoundError:
        raise ValueError("no such file: give --demos a path that exists, or fetch D4RL's data with --demos d4rl:antmaze-large-play-v2") from None
    except (OSError, RuntimeError) as error:
        raise ValueError(f"cannot be read, it is truncated, damaged or no HDF5 ({error}): copy or download it again") from error
    missing = [name for name in names if name not in arrays]
    if missing:
        raise ValueError(f"lacks {', '.join(missing)}: give a file of D4RL's mazes, whose format utils/d4rl.py describes")
    n = len(np.atleast_1d(arrays["observations"]))
    for name, array in arrays.items():
        flat = name in ("rewards", "terminals", "timeouts")
        if flat and array.shape == (n, 1):
            array = arrays[name] = array[:, 0]
        if array.dtype.kind not in "fiub" or array.ndim != (1 if flat else 2) or len(array) != n:
            wanted = f"({n},)" if flat else f"({n}, numbers of a row)"
            raise ValueError(f"{name} is {array.dtype} of shape {array.shape} and should be numbers of shape {wanted}: see the format in utils/d4rl.py")
    if n == 0 or arrays["infos/goal"].shape[1] != 2:
        raise ValueError(f"holds {n} rows with goals of {arrays['infos/goal'].shape[1]} numbers: there must be rows, and goals are x and y")
    return arrays, attributes


def read_demos(path):
    """The fields of a utils.demos.Demos, as a dict; env_id is "" where neither the file nor its name says. Raises ValueError, in one sentence."""
    arrays, attributes = read_arrays(path)
    positions, goals = arrays["observations"].astype(np.float32), arrays["infos/goal"].astype(np.float32)
    timeouts, terminals = arrays["timeouts"].astype(bool), arrays["terminals"].astype(bool)
    n, d = positions.shape
    jumps = np.append(np.linalg.norm(np.diff(positions[:, :2], axis=0), axis=1) > JUMP, False)
    ends = timeouts | jumps
    ends[-1] = True
    last = np.flatnonzero(ends)

    # What came after each row, if infos/qpos and infos/qvel say so: then all rows stay, else the last of each roll-out goes.
    nv = d // 2  # of the ant's 29 numbers, an orientation takes 4 and its velocity 3
    has_after, kept = False, np.ones(n, dtype=bool)
    if "infos/qpos" in arrays and "infos/qvel" in arrays and arrays["infos/qpos"].shape[1] + arrays["infos/qvel"].shape[1] >= d:
        after = np.hstack([arrays["infos/qpos"][:, : d - nv], arrays["infos/qvel"][:, :nv]]).astype(np.float32)
        inside = np.flatnonzero(~ends)
        has_after = bool(len(inside)) and np.isclose(after[inside], positions[inside + 1], atol=1e-5).all(axis=1).mean() > 0.99
    observations, following = np.hstack([positions, goals]), after if has_after else np.roll(positions, -1, axis=0)
    kept[last] = has_after
    starts = np.append(0, last[:-1] + 1)
    some = last + has_after > starts
    starts, last = starts[some], last[some] - (not has_after)
    if len(last) == 0:
        raise ValueError("no roll-out in it has two rows, so that no step is whole: are its timeouts right?")
    final_observations = np.hstack([after, goals])[last] if has_after else observations[last + 1]

    # The first success ends an episode.
    near, ended = np.linalg.norm(following[:, :2] - goals, axis=1) <= GOAL_RADIUS, last.copy()
    for i, start in enumerate(starts):
        if near[start : last[i] + 1].any():
            ended[i] = start + near[start : last[i] + 1].argmax()
            kept[ended[i] + 1 : last[i] + 1] = False
            final_observations[i] = np.append(following[ended[i]], goals[ended[i]])
    n_after_success, lengths = (last - ended).sum(), ended + 1 - starts

    episode_starts = np.cumsum([0, *lengths])
    rows = np.flatnonzero(kept)
    steps = np.arange(len(rows)) - np.repeat(episode_starts[:-1], lengths)
    terminated, truncated = np.zeros(len(rows), dtype=bool), np.zeros(len(rows), dtype=bool)
    succeeded = near[ended] | (terminals[last] & ~timeouts[last] & has_after)
    terminated[episode_starts[1:] - 1] = succeeded
    truncated[episode_starts[1:] - 1] = ~succeeded

    notes = [f"split at {timeouts.sum()} timeouts and at {(terminals & ends & ~timeouts).sum()} successes after which the robot was put elsewhere"]
    n_ignored = (terminals & ~ends).sum()
    if n_ignored:
        notes.append(f"{n_ignored} rows inside roll-outs are flagged terminal and end nothing: D4RL's roll-outs go on after success")
    faults = np.flatnonzero(jumps & ~timeouts & ~terminals)
    if len(faults):
        where = f"first after row {faults[0]}, by {np.linalg.norm(positions[faults[0] + 1, :2] - positions[faults[0], :2]):.1f} m"
        notes.append(f"WARNING: the robot jumps inside {len(faults)} roll-outs ({where}), as in D4RL's v0 files: episodes end there, use the v2 file")
    if n_after_success:
        notes.append(f"{n_after_success} rows left out, which come after the goal was reached")
    if n_unknown := n - len(rows) - n_after_success:
        notes.append(f"{n_unknown} last rows left out, since nothing says what came after them")
    by_name = [env_id for env_id, (name, _, _) in FILES.items() if name == Path(path).name]
    return {
        "observations": observations[rows],
        "actions": arrays["actions"][rows],
        "rewards": arrays["rewards"][rows],
        "terminated": terminated,
        "truncated": truncated,
        "final_observations": final_observations,
        "episode_starts": episode_starts,
        "env_id": str(attributes.get("env_id", by_name[0] if by_name else "")),
        "states": np.hstack([steps[:, None], np.zeros((len(rows), nv)), observations[rows]]),
        "made_by": str(attributes.get("made_by", "D4RL, as the file's name says" if by_name else "unknown")),
        "versions": str(attributes.get("versions", "{}")),
        "exact_states": bool(attributes.get("exact_states", False)),
        "notes": "; ".join(notes),
    }


def write_demos(path, arrays, attributes):
    """Write `arrays` (by the names above) and `attributes` (strings and bools) to `path`, whole or not at all."""
    import h5py

    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with h5py.File(unfinished, "w") as file:
            for name, array in arrays.items():
                file.create_dataset(name, data=array, compression="gzip", compression_opts=9, shuffle=True)
            file.attrs.update(attributes)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
