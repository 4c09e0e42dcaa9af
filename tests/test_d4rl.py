"""D4RL's maze files: rows, ends, goals and states by value; what cannot be trained on is refused in one sentence; downloads come whole or not at all."""

import dataclasses
import hashlib
import http.server
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest

from utils import d4rl
from utils.demos import TOLERANCE, DemosError, load, load_split, read, verify
from utils.envs import MAZE_ENVS, get_state, make_env, set_state

h5py = pytest.importorskip("h5py", reason="needs pip install h5py")
ROOT = Path(__file__).resolve().parents[1]
ANT = "antmaze-large-play-v2"
D4RL_NAME = d4rl.FILES[ANT][0]
NQ, NV = 15, 14


def d4rl_arrays(lengths=(5, 4), d=NQ + NV, k=8):
    """Roll-outs of these lengths in D4RL's schema, of float32 numbers that are all different, 20 m apart, each ending with a timeout; goals are row numbers."""
    n, rng = sum(lengths), np.random.default_rng(0)
    steps, number = np.concatenate([np.arange(length) for length in lengths]), np.repeat(np.arange(len(lengths)), lengths)
    observations, after = rng.normal(size=(2, n, d)).astype(np.float32)
    observations[:, 0], observations[:, 1] = 20 * number + 0.1 * steps, 0
    inside = np.flatnonzero(np.diff(number, append=-1) == 0)
    after[inside] = observations[inside + 1]
    return {
        "observations": observations,
        "actions": rng.uniform(-1, 1, (n, k)).astype(np.float32),
        "rewards": rng.random(n).astype(np.float32),
        "terminals": np.zeros(n, dtype=bool),
        "timeouts": np.isin(np.arange(n), np.cumsum(lengths) - 1),
        "infos/goal": np.stack([np.arange(n), np.full(n, 0.5)], axis=1).astype(np.float32),
        "infos/qpos": after[:, : d - d // 2],
        "infos/qvel": after[:, d - d // 2 :],
    }


def write(path, arrays, **attributes):
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            if array is not None:
                file[name] = array
        file.attrs.update(attributes)
    return path


def refusal(source, env=None):
    """The message with which `source` is refused: one line that names it."""
    with pytest.raises(DemosError) as caught:
        load(source, env) if env else read(source)
    assert str(caught.value).startswith(f"{source}: ") and "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------------------------------------- by value


def test_rows_ends_goals_and_states(tmp_path):
    arrays = d4rl_arrays()
    demos = read(write(tmp_path / D4RL_NAME, arrays))
    observations = np.hstack([arrays["observations"], arrays["infos/goal"]])
    np.testing.assert_array_equal(demos.observations, observations)
    np.testing.assert_array_equal(demos.actions, arrays["actions"])
    np.testing.assert_array_equal(demos.rewards, arrays["rewards"].astype(np.float64))
    assert demos.episode_starts.tolist() == [0, 5, 9] and not demos.terminated.any() and np.flatnonzero(demos.truncated).tolist() == [4, 8]
    last = np.hstack([arrays["infos/qpos"], arrays["infos/qvel"], arrays["infos/goal"]])[[4, 8]]
    np.testing.assert_array_equal(demos.final_observations, last)
    np.testing.assert_array_equal(demos.next_observations, np.vstack([observations[1:5], last[:1], observations[6:9], last[1:]]))
    steps = np.array([0, 1, 2, 3, 4, 0, 1, 2, 3])[:, None]
    np.testing.assert_array_equal(demos.states, np.hstack([steps, np.zeros((9, NV)), observations]))
    assert demos.observations.dtype == demos.actions.dtype == np.float32 and demos.states.dtype == np.float64
    assert demos.env_id == ANT and not demos.exact_states and demos.made_by == "D4RL, as the file's name says"
    assert demos.notes == "split at 2 timeouts and at 0 successes after which the robot was put elsewhere"


@pytest.mark.parametrize("qpos", ["absent", "before the row"])
def test_without_what_came_last_the_last_rows_go_and_goals_stay_aligned(tmp_path, qpos):
    arrays = d4rl_arrays((5, 1, 4))
    for name, columns in (("infos/qpos", slice(0, NQ)), ("infos/qvel", slice(NQ, None))):
        arrays[name] = None if qpos == "absent" else arrays["observations"][:, columns]
    demos = read(write(tmp_path / "file.hdf5", arrays), ANT)
    rows = [0, 1, 2, 3, 6, 7, 8]
    np.testing.assert_array_equal(demos.observations[:, -2], rows)
    np.testing.assert_array_equal(demos.next_observations[:, -2], np.add(rows, 1))
    np.testing.assert_array_equal(demos.final_observations[:, :-2], arrays["observations"][[4, 9]])
    np.testing.assert_array_equal(demos.actions, arrays["actions"][rows])
    assert demos.episode_starts.tolist() == [0, 4, 7] and np.flatnonzero(demos.truncated).tolist() == [3, 6]
    assert demos.notes.endswith("; 3 last rows left out, since nothing says what came after them")


def test_terminal_rows_end_an_episode_only_where_the_robot_was_put_elsewhere(tmp_path):
    arrays = d4rl_arrays((6, 5, 4))
    arrays["terminals"][[2, 3, 4, 5, 10, 14]] = True  # rows 2 to 4 go on; row 5 has a timeout as well; the robot is put elsewhere after row 10
    arrays["timeouts"][[10, 14]] = False
    demos = read(write(tmp_path / "file.hdf5", arrays), ANT)
    assert demos.episode_starts.tolist() == [0, 6, 11, 15]
    assert np.flatnonzero(demos.terminated).tolist() == [10, 14] and np.flatnonzero(demos.truncated).tolist() == [5]
    assert demos.notes.startswith("split at 1 timeouts and at 2 successes") and "; 3 rows inside roll-outs are flagged terminal and end nothing" in demos.notes


@pytest.mark.parametrize("qpos", ["after the row", "absent"])
def test_the_first_success_ends_an_episode(tmp_path, qpos):
    """The goal of rows 2 and 3 is where they lead to, that of row 7, the last of its roll-out, where qpos says that it led; row 6 is 0.51 m away."""
    arrays = d4rl_arrays((5, 3, 4))
    if qpos == "absent":
        arrays["infos/qpos"] = None
    after = np.vstack([arrays["observations"][1:, :2], [[0, 0]]])
    arrays["infos/goal"][[2, 3]] = after[[2, 3]] + [0.3, 0.39]
    arrays["infos/goal"][6] = after[6] + [0, 0.51]
    if qpos == "after the row":
        arrays["infos/goal"][7] = arrays["infos/qpos"][7, :2] - [0.5, 0]
    demos = read(write(tmp_path / "file.hdf5", arrays), ANT)
    rows = [0, 1, 2, *((5, 6, 7, 8, 9, 10, 11) if qpos == "after the row" else (5, 6, 8, 9, 10))]
    np.testing.assert_array_equal(demos.observations[:, :29], arrays["observations"][rows])
    np.testing.assert_array_equal(demos.actions, arrays["actions"][rows])
    np.testing.assert_array_equal(demos.final_observations[0], [*arrays["observations"][3], *arrays["infos/goal"][2]])
    if qpos == "after the row":
        assert demos.episode_starts.tolist() == [0, 3, 6, 10]
        assert np.flatnonzero(demos.terminated).tolist() == [2, 5] and np.flatnonzero(demos.truncated).tolist() == [9]
        assert demos.notes.endswith("; 2 rows left out, which come after the goal was reached")
    else:
        np.testing.assert_array_equal(demos.final_observations[1:, :29], arrays["observations"][[7, 11]])
        assert demos.episode_starts.tolist() == [0, 3, 5, 8]
        assert np.flatnonzero(demos.terminated).tolist() == [2] and np.flatnonzero(demos.truncated).tolist() == [4, 7]
        assert demos.notes.endswith("; 1 rows left out, which come after the goal was reached; 3 last rows left out, since nothing says what came after them")


def test_the_tail_after_the_last_timeout_is_kept(tmp_path):
    arrays = d4rl_arrays((5, 4))
    arrays["timeouts"][8] = False
    demos = read(write(tmp_path / "file.hdf5", arrays), ANT)
    assert demos.episode_starts.tolist() == [0, 5, 9] and np.flatnonzero(demos.truncated).tolist() == [4, 8]


def test_a_jump_ends_an_episode_with_a_warning_that_names_the_row(tmp_path):
    """As in D4RL's v0 files: the timeout is a row late, and the robot jumps before it."""
    arrays = d4rl_arrays((5, 4, 3))
    arrays["timeouts"][[4, 5]] = False, True
    with pytest.warns(UserWarning, match=r"jumps inside 1 roll-outs \(first after row 4, by 19.6 m\).*use the v2 file"):
        demos = read(write(tmp_path / "file.hdf5", arrays), ANT)
    assert demos.episode_starts.tolist() == [0, 5, 6, 9, 12]
    moved = np.linalg.norm(demos.next_observations[:, :2] - demos.observations[:, :2], axis=1)
    assert (np.delete(moved, demos.episode_starts[1:] - 1) < 1.5).all()


def test_rows_as_columns_and_other_number_types(tmp_path):
    arrays = d4rl_arrays()
    other = {name: arrays[name].astype(np.float64) for name in ("observations", "actions", "rewards", "infos/goal")}
    other |= {name: arrays[name][:, None].astype(np.uint8) for name in ("terminals", "timeouts")}
    other["rewards"] = other["rewards"][:, None]
    a, b = (read(write(tmp_path / name, content), ANT) for name, content in (("a.hdf5", arrays), ("b.h5", arrays | other)))
    for field in dataclasses.fields(a):
        np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name), err_msg=field.name)


def test_cut_to_the_horizon(tmp_path):
    """Roll-outs of 9, 5 and 4 rows, and a horizon of 5: the sixth row's observation is the first one's last."""
    demos = read(write(tmp_path / "file.hdf5", d4rl_arrays((9, 5, 4))), ANT)
    cut = demos.cut(5)
    assert cut.lengths.tolist() == [5, 5, 4] and np.flatnonzero(cut.truncated).tolist() == [4, 9, 13]
    np.testing.assert_array_equal(cut.observations, demos.observations[[*range(5), *range(9, 18)]])
    np.testing.assert_array_equal(cut.final_observations, np.vstack([demos.observations[5], demos.final_observations[1:]]))
    assert cut.states[:, 0].max() == 4 and len(cut.actions) == len(cut.states) == 14
    same = demos.cut(9)
    np.testing.assert_array_equal(same.truncated, demos.truncated)
    np.testing.assert_array_equal(same.final_observations, demos.final_observations)


# ------------------------------------------------------------------------------------------------------------------------------------ refusals


def broken(**changes):
    return lambda path: write(path, d4rl_arrays() | {name.replace("__", "/"): value for name, value in changes.items()})


def cut_short(path):
    whole = write(path.with_name("whole.hdf5"), d4rl_arrays((200,))).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


def with_nan(path):
    arrays = d4rl_arrays()
    arrays["observations"][6, 3] = np.nan
    write(path, arrays | {"infos/qpos": None})


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda path: None, "no such file"),
        (lambda path: path.write_bytes(b"no hdf5"), "cannot be read, it is truncated, damaged or no HDF5"),
        (cut_short, "cannot be read, it is truncated, damaged or no HDF5"),
        (broken(timeouts=None, infos__goal=None), "lacks timeouts, infos/goal: give a file of D4RL's mazes"),
        (lambda path: write(path, {"actions/deep": np.zeros(3)}), "lacks observations, actions, rewards, terminals, timeouts, infos/goal"),
        (broken(actions=np.zeros((8, 8))), r"actions is float64 of shape \(8, 8\) and should be numbers of shape \(9, "),
        (broken(rewards=np.zeros((9, 2))), r"rewards is float64 of shape \(9, 2\) and should be numbers of shape \(9,\)"),
        (broken(observations=np.zeros(9)), r"observations is float64 of shape \(9,\)"),
        (broken(terminals=np.array([b"x"] * 9)), r"terminals is \|S1 of shape"),
        (broken(infos__goal=np.zeros((9, 3))), "holds 9 rows with goals of 3 numbers"),
        (broken(**{name.replace("/", "__"): array[:0] for name, array in d4rl_arrays().items()}), "holds 0 rows"),
        (broken(timeouts=np.ones(9), infos__qpos=None), "no roll-out in it has two rows"),
        (lambda path: write(path, d4rl_arrays(), versions="no JSON"), "Expecting value"),
        (with_nan, r"observations has a NaN or an infinity in row 5 \(episode 1, step 1\)"),
    ],
)
def test_broken_files_are_refused_in_one_sentence(tmp_path, make, message):
    path = tmp_path / "file.hdf5"
    make(path)
    with pytest.raises(DemosError, match=message):
        read(path)
    refusal(path)


def test_refused_by_the_task(tmp_path):
    pytest.importorskip("mujoco")
    ant, ball = make_env(ANT), make_env("PointMaze_Large-v0")
    arrays = d4rl_arrays((5, 4))
    assert "was made in antmaze-large-play-v2 and not in PointMaze_Large-v0" in refusal(write(tmp_path / D4RL_NAME, arrays), ball)
    path = write(tmp_path / "file.hdf5", arrays)
    assert "observations has the shape (9, 31) and PointMaze_Large-v0 has (6,) a step" in refusal(path, ball)
    arrays["actions"][6, 2] = 1.5
    assert "actions has 1.5 in row 6 (episode 1, step 1), outside [-1, 1]" in refusal(write(path.with_name("a.hdf5"), arrays), ant)
    arrays = d4rl_arrays((5, 4))
    for name in ("observations", "infos/qpos"):
        arrays[name][5:, 0] -= 4  # along the lowest row, 20 m is free and 16 m is a wall
    assert "4 of 9 observations are inside the walls of antmaze-large-play-v2, the first in row 5" in refusal(write(path.with_name("b.hdf5"), arrays), ant)


def test_without_h5py(tmp_path, monkeypatch):
    path = write(tmp_path / "file.hdf5", d4rl_arrays())
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert refusal(path).endswith("D4RL's files need a package that is not installed: pip install h5py")


def test_inspect_reports(tmp_path):
    arrays = d4rl_arrays((5, 4))
    arrays["terminals"][2] = True
    path = write(tmp_path / D4RL_NAME, arrays)
    run = subprocess.run([sys.executable, "utils/demos.py", "inspect", str(path)], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    for line in ("episodes        2 of 9 steps in all, 0 terminated, 2 truncated", "states          46 numbers a step, not exact", f"environment     {ANT}"):
        assert line in run.stdout
    assert "reading it      split at 2 timeouts and at 0 successes" in run.stdout and "1 rows inside roll-outs are flagged terminal" in run.stdout
    run = subprocess.run([sys.executable, "utils/demos.py", "inspect", "nowhere.hdf5"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1 and run.stderr.startswith("nowhere.hdf5: no such file") and len(run.stderr.splitlines()) == 1


# ------------------------------------------------------------------------------------------------------------------------------ states of the ant


def test_the_reference_is_the_share_that_reached_their_goal(tmp_path):
    """One of two. D4RL's rewards, 1 at every row near another goal, add up to hundreds."""
    pytest.importorskip("mujoco")
    walks = [walk_like_d4rl(make_env(ANT, seed=3), 41) for _ in range(2)]
    walks[0]["infos/goal"][:] = walks[0]["observations"][21, :2]
    for walk in walks:
        walk["rewards"][:] = 1
    path = write(tmp_path / "two.hdf5", {name: np.concatenate([walk[name] for walk in walks]) for name in walks[0]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        demos, _, references = load_split(path, make_env(ANT, horizon=40), 1, 1)
    assert references == {"demonstrations (p_tremble 0)": 0.5} and demos.lengths[0] <= 21 and demos.terminated[-1]


def walk_like_d4rl(env, n_steps, scale=1.0):
    """D4RL's arrays of an ant that acts at random; `scale` is a wrong torque."""
    rng, rows = np.random.default_rng(0), []
    observation, _ = env.reset()
    for t in range(n_steps):
        action = env.random_action(rng)
        after = env.step(scale * action)[0]
        rows.append((observation[:29], action, 0.0, t % 7 == 0, t == n_steps - 1, observation[29:], after[:15], after[15:29]))
        observation = after
    names = ("observations", "actions", "rewards", "terminals", "timeouts", "infos/goal", "infos/qpos", "infos/qvel")
    return {name: np.array(column, dtype=np.float32) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def test_d4rls_states_are_accepted_with_a_warning_and_another_robots_refused(tmp_path):
    pytest.importorskip("mujoco")
    env = make_env(ANT, seed=3)
    path = write(tmp_path / "good.hdf5", walk_like_d4rl(env, 300))
    with pytest.warns(UserWarning, match="its states are not exact; 200 of 300 steps replayed.*the median step's error is .*e-0[567]"):
        demos = load(path, env)
    assert demos.n_episodes == 1 and demos.env_id == ANT
    for scale in (0.5, 0.0):
        path = write(tmp_path / f"scale{scale}.hdf5", walk_like_d4rl(make_env(ANT, seed=3), 300, scale))
        assert "does not reproduce it (its states are not exact" in refusal(path, env)


def test_long_roll_outs_are_cut_to_the_horizon_with_a_warning(tmp_path):
    pytest.importorskip("mujoco")
    env = make_env(ANT, horizon=30, seed=3)
    path = write(tmp_path / "long.hdf5", walk_like_d4rl(env, 41))
    with pytest.warns(UserWarning) as caught:
        demos = load(path, env)
    assert any(f"{path}: 11 of 41 rows lie past the horizon of 30 steps and are left out" in str(warning.message) for warning in caught)
    assert demos.lengths.tolist() == [30] and demos.states[:, 0].tolist() == list(range(30)) and demos.truncated.tolist() == [False] * 29 + [True]
    set_state(env, demos.states[-1])
    assert env.step(demos.actions[-1])[3]  # every state that can be reset to has a step left


def test_the_validation_demonstrations_are_cut_to_the_horizon_of_evaluation(tmp_path):
    """Else a policy as good as the expert would be compared with one that seems to end early."""
    pytest.importorskip("mujoco")
    env, evaluation_env = make_env(ANT, horizon=30, seed=3), make_env(ANT, horizon=40)
    walks = [walk_like_d4rl(env, 41) for _ in range(2)]
    path = write(tmp_path / "two.hdf5", {name: np.concatenate([walk[name] for walk in walks]) for name in walks[0]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        demos, validation_demos, _ = load_split(path, env, 1, 1, evaluation_env)
    assert demos.lengths.tolist() == [30] and validation_demos.lengths.tolist() == [40]
    np.testing.assert_array_equal(validation_demos.observations[:, :29], walks[1]["observations"][:40])


# ----------------------------------------------------------------------------------------------------------------------- found in the cache or fetched

CONTENT = b"not really a file of 231 MB"


class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path != f"/{D4RL_NAME}":
            return self.send_error(404)
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[: self.server.n_sent])

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A stand-in for D4RL's server on this machine; the cache is tmp_path / "cache"."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        server.n_sent = len(CONTENT)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setattr(d4rl, "ADDRESS", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setitem(d4rl.FILES, ANT, (D4RL_NAME, len(CONTENT), hashlib.sha256(CONTENT).hexdigest()))
        monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path / "cache"))
        yield server
        server.shutdown()
        thread.join()


def test_fetched_once_and_checked(server, tmp_path):
    path = d4rl.locate(ANT)
    assert path == tmp_path / "cache" / D4RL_NAME and path.read_bytes() == CONTENT and [p.name for p in path.parent.iterdir()] == [D4RL_NAME]
    server.n_sent = 0
    assert d4rl.locate(ANT) == path  # not fetched again


def test_a_cached_file_that_is_not_d4rls_is_refused(server, tmp_path):
    path = d4rl.locate(ANT)
    for content, fault in ((CONTENT[:-3], "24 bytes instead of 27"), (CONTENT[::-1], "its SHA-256 is")):
        path.write_bytes(content)
        message = refusal(f"d4rl:{ANT}")
        assert f"{path} is not D4RL's file, or only a part of it ({fault}" in message and message.endswith("delete it, and the next start fetches it")


@pytest.mark.parametrize("fault", ["cut off", "checksum", "404", "offline"])
def test_a_failed_download_says_what_to_do_and_leaves_nothing(server, tmp_path, monkeypatch, fault):
    if fault == "cut off":
        server.n_sent = 5
    if fault == "checksum":
        monkeypatch.setitem(d4rl.FILES, ANT, (D4RL_NAME, len(CONTENT), "0" * 64))
    if fault == "404":
        monkeypatch.setattr(d4rl, "ADDRESS", d4rl.ADDRESS + "elsewhere/")
    if fault == "offline":
        monkeypatch.setattr(d4rl, "ADDRESS", "http://127.0.0.1:1/")
    message = refusal(f"d4rl:{ANT}")
    assert f"the download of {D4RL_NAME} failed (" in message
    assert message.endswith(f"fetch {d4rl.ADDRESS}{D4RL_NAME} by hand and put it at {tmp_path / 'cache' / D4RL_NAME}")
    assert list((tmp_path / "cache").iterdir()) == []


def test_verify_a_file_that_does_not_say_its_task(tmp_path, capsys):
    """It is the task that is named, as in training."""
    with h5py.File(tmp_path / "mine.hdf5", "w") as mine, h5py.File(ROOT / "utils" / "data" / "PointMaze_Large-v0.hdf5") as shipped:
        end = int(np.flatnonzero(shipped["terminals"][:])[0]) + 1
        for name, array in shipped.items():
            if name != "infos":
                mine[name] = array[:end]
        for name, array in shipped["infos"].items():
            mine[f"infos/{name}"] = array[:end]
    with pytest.raises(ValueError, match="unknown"):
        verify(str(tmp_path / "mine.hdf5"), TOLERANCE)
    verify(str(tmp_path / "mine.hdf5"), TOLERANCE, "PointMaze_Large-v0")
    assert "steps replayed" in capsys.readouterr().out


def test_files_of_unknown_checksum_are_used_but_not_fetched(server, tmp_path):
    name = d4rl.FILES["antmaze-medium-play-v2"][0]
    assert f"is not fetched because its checksum is not known here: fetch {d4rl.ADDRESS}{name} by hand" in refusal("d4rl:antmaze-medium-play-v2")
    (tmp_path / "cache").mkdir()
    write(tmp_path / "cache" / name, d4rl_arrays())
    assert read("d4rl:antmaze-medium-play-v2").env_id == "antmaze-medium-play-v2"
    assert "D4RL has no such maze data set: known are antmaze-umaze-v2, " in refusal("d4rl:hopper-medium-v2")
    assert set(d4rl.FILES) == {env_id for env_id in MAZE_ENVS if env_id.startswith("antmaze")}


def test_default_cache_and_address(monkeypatch):
    """D4RL's own, and nothing is fetched here."""
    monkeypatch.delenv("D4RL_DATASET_DIR", raising=False)
    asked = []
    monkeypatch.setattr(d4rl, "fetch", lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(Path, "exists", lambda path: False)
    path = d4rl.locate(ANT)
    assert path == Path.home() / ".d4rl" / "datasets" / D4RL_NAME
    assert asked[0][0] == f"http://rail.eecs.berkeley.edu/datasets/offline_rl/ant_maze_v2/{D4RL_NAME}" and asked[0][2] == 230_880_653


# ---------------------------------------------------------------------------------------------------------------------------------- what is shipped

SHIPPED = [path.stem for path in sorted((ROOT / "utils" / "data").glob("*.hdf5"))]


@pytest.mark.parametrize("env_id", SHIPPED)
def test_shipped_demonstrations(env_id):
    """50 successes within the learner's horizon, from states that restore, and said not to be D4RL's."""
    mujoco = pytest.importorskip("mujoco")
    if tuple(map(int, mujoco.__version__.split(".")[:2])) < (3, 14):
        pytest.skip("recorded with MuJoCo 3.17; before 3.14 a few contacts with walls come out otherwise, and loading refuses")
    env = make_env(env_id, horizon=700)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # another CPU or MuJoCo may differ in the last digit; load_split refuses more
        demos, validation_demos, references = load_split("", env, 45, 5)
    assert demos.n_episodes == 45 and validation_demos.n_episodes == 5 and demos.exact_states and "NOT D4RL's data" in demos.made_by
    for some in (demos, validation_demos):
        assert (some.returns == 1).all() and some.terminated.sum() == some.n_episodes and not some.truncated.any() and some.lengths.max() <= 700
        goals = some.observations[some.episode_starts[:-1], -2:]
        assert len(np.unique(goals, axis=0)) == some.n_episodes and (goals >= [32, 24]).all() and (goals <= [33.5, 25.5]).all()
    (reference,) = references.values()
    assert 0 < reference <= 1
    set_state(env, demos.states[100])
    np.testing.assert_array_equal(get_state(env), demos.states[100])
