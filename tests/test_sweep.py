"""utils/sweep.py: it does what is missing and nothing else, whatever happened to it before. Most tests sweep a stand-in that trains for a second."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from algos import filter_br
from utils import sweep as module
from utils.demos import record, save
from utils.envs import make_env

ROOT = Path(__file__).resolve().parents[1]
# A script with the family's flags and files, whose returns come from a generator: they are right only if a resume goes on where the checkpoint stands.
STAND_IN = """
import csv, json, os, pickle, random, sys, time
from dataclasses import asdict, dataclass
from pathlib import Path
import tyro

@dataclass
class Args:
    env_id: str = "A-v0"
    seed: int = 1
    torch_threads: int = 4
    total_timesteps: int = 8
    seconds: float = 0.0
    alpha: float = 0.5
    failing_seed: int = 0
    pause: str = ""
    demos: str = ""
    resume: str = ""
    eval: str = ""

def check_args(args):
    if args.alpha > 1:
        raise SystemExit("--alpha is too high")

def main():
    args = tyro.cli(Args)
    folder = Path(args.resume or f"{Path(__file__).resolve().parents[1]}/runs/{args.env_id}__stand_in__{args.seed}__{time.strftime('%H%M%S')}-{os.getpid()}")
    if args.resume:
        args = Args(**{name: json.loads((folder / "args.json").read_text())[name] for name in asdict(args)})
    else:
        folder.mkdir(parents=True)
        (folder / "args.json").write_text(json.dumps(asdict(args) | {"exp_name": "stand_in", "versions": {"commit": "abc"}, "machine": "here"}))
    checkpoint, rows, rng = folder / "checkpoint.pt", [], random.Random(args.seed)
    if checkpoint.exists():
        rows, state = pickle.loads(checkpoint.read_bytes())
        rng.setstate(state)
    while len(rows) < args.total_timesteps:
        if args.failing_seed == args.seed and len(rows) == 2:
            sys.exit("it broke")
        time.sleep(args.seconds / args.total_timesteps)
        for _ in range(30000):  # after the first step, until the file `pause` is removed
            if not rows or not args.pause or not os.path.exists(args.pause):
                break
            time.sleep(0.01)
        rows.append({"charts/timesteps": len(rows) + 1, "charts/seconds": 60.0, "eval/return": rng.random()})
        with open(folder / "metrics.csv", "w") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        (folder / "tmp").write_bytes(pickle.dumps((rows, rng.getstate())))
        os.replace(folder / "tmp", checkpoint)
    print(os.environ["OMP_NUM_THREADS"], args.torch_threads, "threads")
    score = {"timesteps": len(rows), "return": rows[-1]["eval/return"], "return_std": 0.0, "length": 1.0, "episodes": 1}
    (folder / "tmp").write_text(json.dumps({"selected": score, "final": score, "references": {"expert (p_tremble 0.1)": 1.0, "random policy": 0.0}}))
    os.replace(folder / "tmp", folder / "scores.json")

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def make_checkout(tmp_path):
    """Makes copies of the repository's scripts, with the stand-in among the algorithms and a `runs` of their own."""

    def make_checkout(name="checkout"):
        for folder in ("algos", "utils"):
            shutil.copytree(ROOT / folder, tmp_path / name / folder, ignore=shutil.ignore_patterns("data", "__pycache__"))
        (tmp_path / name / "algos" / "stand_in.py").write_text(STAND_IN)
        return tmp_path / name

    return make_checkout


def start(checkout, *words):
    with open(checkout / "said", "w") as file:  # a pipe would stay open for as long as a job lives
        heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731 - a shell's background jobs, and so their children, ignore it
        process = subprocess.Popen([sys.executable, "utils/sweep.py", *map(str, words)], cwd=checkout, stdout=file, stderr=file, preexec_fn=heed)
    process.said = checkout / "said"
    return process


def finish(process):
    """Its exit code, and what it said."""
    return process.wait(timeout=600), process.said.read_text()


def stand_ins(*flags, seeds=(1, 2, 3, 4)):
    return ["--algos", "stand_in", "--env-ids", "A-v0", "--seeds", *seeds, "--workers", min(2, os.cpu_count()), "--", *flags]


def wait_until(condition):
    deadline = time.time() + 300
    while not condition():
        assert time.time() < deadline, "it never happened"
        time.sleep(0.01)


def runs_with(checkout, name):
    return {path.parent for path in checkout.glob(f"runs/*/{name}")}


def half_way(checkout):
    """Runs with a checkpoint and up to three rows, of six: far enough from their end to be killed on their way."""
    rows = {folder: len(folder.joinpath("metrics.csv").read_text().splitlines()) - 1 for folder in runs_with(checkout, "checkpoint.pt")}
    return {folder for folder in rows if 1 <= rows[folder] <= 3}


def table(checkout):
    """What utils/plot.py makes of the runs, without the wall times."""
    plot = [sys.executable, "utils/plot.py", "runs", "--out", "figure", "--n-resamples", "10"]
    out = subprocess.run(plot, cwd=checkout, check=True, capture_output=True, text=True).stdout
    return [line.rsplit("|", 2)[0] if line.startswith("|") else line for line in out.splitlines()]


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def real_sweep(tmp_path):
    """Tiny trainings by filter_br.py."""
    env = make_env("Pendulum-v1", seed=3, horizon=40)
    save(tmp_path / "demos.npz", record(env, lambda observation: env.action_space.high * 0, 3, "a test"))
    flags = f"--demos {tmp_path / 'demos.npz'} --n-demos 2 --n-validation-demos 1 --total-timesteps 600 --iteration-timesteps 100 --eval-every 1"
    flags += " --eval-episodes 1 --final-eval-episodes 1 --n-rollouts 1 --batch-size 16 --disc-batch-size 16 --buffer-size 600"
    flags += " --gradient-steps 1 --learning-starts 64 --alpha 0"
    return ["--algos", "filter_br", "--env-ids", "Pendulum-v1", "--seeds", 1, 2, 3, 4, "--workers", 2, "--", *flags.split()]


needs_two_cores = pytest.mark.skipif(os.cpu_count() < 2, reason="two runs at a time")
needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are found by /proc")


# ------------------------------------------------------------------------------------------------------------------------ killed and started again


@needs_two_cores
@needs_proc
def test_killed_and_started_again_it_ends_with_the_same_table(make_checkout, tmp_path):
    """All its processes by SIGKILL, as at a power cut, with one run finished and another on its way."""
    words = real_sweep(tmp_path)
    checkout, uninterrupted = make_checkout(), make_checkout("uninterrupted")
    process = start(checkout, *words)
    wait_until(lambda: runs_with(checkout, "scores.json") and half_way(checkout))
    for pid in [process.pid, *children(process.pid)]:
        os.kill(pid, signal.SIGKILL)
    assert finish(process)[0] == -signal.SIGKILL
    finished, interrupted = runs_with(checkout, "scores.json"), runs_with(checkout, "checkpoint.pt") - runs_with(checkout, "scores.json")
    before = {folder: folder.joinpath("metrics.csv").stat().st_mtime_ns for folder in finished}
    assert 1 <= len(finished) <= 3 and interrupted

    code, said = finish(start(checkout, *words))
    assert code == 0, said
    for folder in interrupted:
        assert f"--resume runs/{folder.name}" in said
    for folder in finished:
        assert f"finished  runs/{folder.name}" in said and folder.joinpath("metrics.csv").stat().st_mtime_ns == before[folder]
    assert len(runs_with(checkout, "scores.json")) == 4 and interrupted <= runs_with(checkout, "scores.json")
    code, said = finish(start(uninterrupted, *words))
    assert code == 0, said
    assert table(checkout) == table(uninterrupted) and " | 4 | " in table(checkout)[2]

    code, said = finish(start(checkout, *words))
    assert code == 0 and [line.split()[0] for line in said.splitlines() if line.startswith(("finished", "resume", "start"))] == ["finished"] * 4


@needs_two_cores
@needs_proc
def test_what_a_killed_sweep_left_running_is_waited_for(make_checkout, tmp_path):
    """Two trainings of one run would write over each other's files."""
    checkout, pause = make_checkout(), tmp_path / "pause"
    pause.touch()
    words = stand_ins("--pause", pause, seeds=(1, 2))
    process = start(checkout, *words)
    wait_until(lambda: len(runs_with(checkout, "checkpoint.pt")) == 2)
    orphans = children(process.pid)
    process.kill()
    finish(process)

    def n_starts():
        return sum(log.read_text().count("$ python") for log in checkout.glob("runs/sweep/*.log"))

    process = start(checkout, *words)
    wait_until(lambda: process.said.read_text().count("another process is at it") == 2 or n_starts() > 2)
    assert all(map(alive, orphans)) and n_starts() == 2
    pause.unlink()
    code, said = finish(process)
    assert code == 0 and len(runs_with(checkout, "args.json")) == len(runs_with(checkout, "scores.json")) == 2, said
    assert said.count("finished  stand_in A-v0 seed") == 2 and n_starts() == 2


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_its_runs_too(make_checkout, number):
    checkout = make_checkout()
    process = start(checkout, *stand_ins("--seconds", 60, "--total-timesteps", 600, seeds=(1,)))
    wait_until(lambda: runs_with(checkout, "checkpoint.pt"))
    pids = children(process.pid)
    process.send_signal(number)
    code, said = finish(process)
    assert code == 1 and "the same command goes on" in said and "Traceback" not in said
    assert len(pids) == 1 and not alive(pids[0])


# -------------------------------------------------------------------------------------------------------------------------------- failures, dry runs


@needs_two_cores
def test_a_failed_run_is_named_and_the_others_go_on(make_checkout):
    checkout = make_checkout()
    code, said = finish(start(checkout, *stand_ins("--failing-seed", 2, seeds=(1, 2, 3))))
    log = next(checkout.glob("runs/sweep/stand_in__A-v0__2__*.log"))
    assert code == 1 and f"1 of 3 runs failed:\n  stand_in A-v0 seed 2: runs/sweep/{log.name}" in said and "exit code 1" in said
    assert "it broke" in log.read_text()
    assert {json.loads((folder / "args.json").read_text())["seed"] for folder in runs_with(checkout, "scores.json")} == {1, 3}
    assert "1 1 threads" in next(checkout.glob("runs/sweep/stand_in__A-v0__1__*.log")).read_text()


def test_a_dry_run_prints_the_commands_and_runs_nothing(make_checkout):
    checkout = make_checkout()
    code, said = finish(start(checkout, "--algos", "stand_in", "--env-ids", "A-v0", "B-v0", "--seeds", 1, 2, 2, "--dry-run", "--", "--alpha", 0.25))
    commands = [
        f"start     python algos/stand_in.py --env-id {env_id} --seed {seed} --torch-threads 1 --alpha 0.25" for env_id in ("A-v0", "B-v0") for seed in (1, 2)
    ]
    assert code == 0 and said.splitlines() == commands and not (checkout / "runs").exists()


# ------------------------------------------------------------------------------------------------------------------------------ what is found in runs/


@pytest.fixture
def here(make_checkout, monkeypatch):
    """The module as if it lay in a checkout."""
    checkout = make_checkout()
    monkeypatch.setattr(module, "ROOT", checkout)
    monkeypatch.setattr(module, "RUNS", checkout / "runs")
    return checkout


def sweep_args(*algos, **changes):
    return module.Args(**({"algos": algos or ("stand_in",), "env_ids": ("A-v0",), "seeds": (1,)} | changes))


def leave(checkout, name, run, n_rows=0, checkpoint=False, scores=False, **changes):
    """A run's folder as it was left."""
    folder = checkout / "runs" / name
    folder.mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps(run.args | {"exp_name": run.algo} | changes))
    (folder / "metrics.csv").write_text("charts/timesteps,eval/return\n" + "".join(f"{i},\n" for i in range(n_rows)) + "1234")
    for there, path in ((checkpoint, "checkpoint.pt"), (scores, "scores.json")):
        if there:
            (folder / path).touch()
    return folder


def test_a_run_is_known_by_all_its_arguments(here):
    (run,) = module.plan(sweep_args(), ["--alpha", "0.25"])
    assert run.args["alpha"] == 0.25 and run.args["torch_threads"] == 1 and run.args["total_timesteps"] == 8
    leave(here, "no_checkpoint", run, n_rows=9)
    for i, change in enumerate(({"alpha": 0.5}, {"seed": 2}, {"env_id": "B-v0"}, {"exp_name": "other"}, {"total_timesteps": 9})):
        leave(here, f"other{i}", run, checkpoint=True, scores=True, **change)
    assert module.find(run) == ("start", None)
    leave(here, "z_less", run, n_rows=2, checkpoint=True)
    more = leave(here, "more", run, n_rows=10, checkpoint=True)
    leave(here, "a_less", run, n_rows=9, checkpoint=True)
    assert module.find(run) == ("resume", more)
    assert module.command(run)[1:] == ["--resume", os.path.relpath(more)]
    done = leave(here, "done", run, scores=True)
    assert module.find(run) == ("finished", done)


def test_a_run_has_one_thread_and_a_session_of_its_own(here, monkeypatch):
    """Whatever the sweep's own environment says; and a terminal's Ctrl-C reaches the sweep alone."""
    started = []
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setattr(module.subprocess, "Popen", lambda words, **options: started.append((words, options)))
    (run,) = module.plan(sweep_args(), [])
    module.begin(run)
    ((words, options),) = started
    assert words[2:] == run.flags and "--torch-threads 1" in " ".join(words) and options["start_new_session"]
    assert {options["env"][name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {"1"}


def test_a_run_that_another_process_is_at_is_not_started_twice(here, monkeypatch):
    """One that was started by hand, before its first checkpoint and after it. With the process its hold ends, and the run is resumed."""
    (run,) = module.plan(sweep_args(), [])
    folder = leave(here, "by_hand", run)
    assert module.find(run) == ("start", None)
    with filter_br.hold(folder):
        assert module.find(run) == ("resume", folder) and module.begin(run) is None
        (folder / "checkpoint.pt").touch()
        assert module.find(run) == ("resume", folder) and module.begin(run) is None
        with pytest.raises(SystemExit, match=f"^another process is at {folder}: wait for its end, or stop it$"):
            filter_br.hold(folder)
    further = leave(here, "further", run, n_rows=10, checkpoint=True)
    with filter_br.hold(folder):
        assert module.find(run) == ("resume", folder)
    assert module.find(run) == ("resume", further) and not module.is_held(folder)
    shutil.rmtree(further)
    with monkeypatch.context() as patch:  # it finishes while it is looked at
        patch.setattr(module, "is_held", lambda there: (there / "scores.json").touch() or False)
        assert module.begin(run) is None
    (folder / "scores.json").unlink()
    process = module.begin(run)
    assert process.args[2:] == ["--resume", os.path.relpath(folder)]
    process.kill()
    process.wait()


def test_a_file_system_without_locks(here, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(module.fcntl, "flock", flock)
    monkeypatch.setattr(module.subprocess, "Popen", lambda words, **options: words)
    (run,) = module.plan(sweep_args(), [])
    assert module.begin(run)[2:] == run.flags


@pytest.mark.parametrize("content", ["", "{", "[1]", "3"])
def test_what_is_no_run_is_passed_over(here, content):
    (run,) = module.plan(sweep_args(), [])
    folder = leave(here, "run", run, checkpoint=True)
    (leave(here, "other", run, checkpoint=True) / "args.json").write_text(content)
    assert module.find(run) == ("resume", folder)


def test_progress(here):
    (run,) = module.plan(sweep_args(), [])
    assert module.progress(run).split() == ["stand_in", "A-v0", "seed", "1", "0/8"]
    folder = leave(here, "run", run, checkpoint=True)
    (folder / "metrics.csv").write_text("charts/timesteps,eval/return\n1,\n2,7.25\n3,\n4,99")  # the last row is being written
    assert module.progress(run).split() == ["stand_in", "A-v0", "seed", "1", "3/8", "return", "7.2"]


def test_relative_demonstrations_are_the_same_run(here, monkeypatch):
    """Scripts write the whole path to args.json."""
    monkeypatch.chdir(here)
    Path("my.npz").touch()
    (run,) = module.plan(sweep_args(), ["--demos", "my.npz"])
    assert run.args["demos"] == str(here / "my.npz")


def test_the_family_can_be_planned():
    """What is compared are the arguments that filter_br.py itself would write."""
    (run,) = module.plan(module.Args(algos=("filter_br",), env_ids=("HopperBulletEnv-v0",), seeds=(4,)), ["--no-gsde", "--eval-every", "2"])
    from algos.filter_br import Args

    assert run.args == asdict(Args(env_id="HopperBulletEnv-v0", seed=4, torch_threads=1, gsde=False, eval_every=2))


REFUSALS = {
    "--algos nothing --env-ids A-v0": "--algos nothing: no such script, there are bc, filter_br, filter_nr, ",
    "--algos other --env-ids A-v0": "--env-id is no flag of algos/other.py",
    "--algos stand_in --env-ids A-v0 -- --beta 1": "--beta is no flag of algos/stand_in.py",
    "--algos stand_in --env-ids A-v0 -- --alpha 2": "stand_in A-v0: --alpha is too high",
    "--algos stand_in --env-ids A-v0 -- --seed 5": "--seed is set by the sweep",
    "--algos stand_in --env-ids A-v0 -- --env_id=B-v0": "--env_id=B-v0 is set by the sweep",
    "--algos --env-ids A-v0": "--algos names none: give at least one",
    "--algos stand_in --env-ids A-v0 --seeds -1 1": "--seeds has -1: give whole numbers of at least 0",
    "--algos stand_in --env-ids A-v0 --seeds": "--seeds names none: give at least one",
    "--algos stand_in --env-ids A-v0 --workers 0": "--workers is 0: give 1 to ",
    "--algos stand_in --env-ids A-v0 --workers 10000": "--workers is 10000: give 1 to ",
    "--algos stand_in --env-ids A-v0 --slurm cpu": "--slurm cpu: give NAME=VALUE",
    "--algos stand_in --env-ids A-v0 --slurm partition=cpu": "--slurm needs a package that is not installed: pip install submitit",
}


@pytest.mark.parametrize("words", REFUSALS)
def test_refusals_are_one_sentence(words, here, monkeypatch):
    (here / "algos" / "other.py").write_text("from dataclasses import dataclass\n\n@dataclass\nclass Args:\n    seed: int = 1\n")
    find_spec = module.importlib.util.find_spec
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None if name == "submitit" else find_spec(name))
    monkeypatch.setattr(sys, "argv", ["sweep.py", *words.split()])
    monkeypatch.setattr(module.subprocess, "Popen", None)  # nothing is run
    with pytest.raises(SystemExit) as refusal:
        module.main()
    assert str(refusal.value).startswith(REFUSALS[words]) and "\n" not in str(refusal.value)


def test_slurm_without_slurm(here, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="--slurm needs sbatch, which this machine does not have"):
        module.submit(module.plan(sweep_args(), []), ["partition=cpu"], [], 1)


@pytest.mark.parametrize(
    ("option", "message"),
    [("time=12:00:00", "--slurm time=12:00:00: give whole minutes"), ("nonsense=3", "--slurm: .*nonsense"), ("cluster=foo", "--slurm: .*foo")],
)
def test_options_that_slurm_does_not_have(option, message, here, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setattr(module.shutil, "which", lambda name: name)
    monkeypatch.setattr(module.subprocess, "run", lambda *args, **kwargs: subprocess.CompletedProcess(args, 0, stdout=""))
    with pytest.raises(SystemExit, match=message):
        module.submit(module.plan(sweep_args(), []), [option], [], 1)


# --------------------------------------------------------------------------------------------------------------------------------------- clusters


def has_slurm():
    return shutil.which("sinfo") and "idle" in subprocess.run(["sinfo", "--noheader"], check=False, capture_output=True, text=True).stdout


@needs_two_cores
@needs_proc
@pytest.mark.parametrize("cluster", ["local", "slurm"])
def test_a_requeued_job_resumes(make_checkout, tmp_path, cluster):
    """One job a run. "local" is submitit's own stand-in for a scheduler; where there is a Slurm, it is tried as well."""
    pytest.importorskip("submitit")
    if cluster == "slurm" and not has_slurm():
        pytest.skip("no Slurm with an idle node here")
    checkout, uninterrupted, pause = make_checkout(), make_checkout("uninterrupted"), tmp_path / "pause"
    pause.touch()
    flags = ["--pause", pause]
    words = ["--algos", "stand_in", "--env-ids", "A-v0", "--seeds", 1, 2, "--workers", 2, "--slurm", f"cluster={cluster}", "time=20", "--", *flags]
    code, said = finish(start(checkout, *words))
    assert code == 0 and said.count("submitted stand_in A-v0") == 2, said
    job = int(re.search(r"seed 1: job (\d+)", said)[1])
    wait_until(lambda: len(runs_with(checkout, "checkpoint.pt")) == 2)
    if cluster == "slurm":
        assert finish(start(checkout, *words))[1].count("queued    stand_in A-v0") == 2
        subprocess.run(["scontrol", "requeue", str(job)], check=True)
    else:
        while "submitit.core._submit" not in Path(f"/proc/{job}/cmdline").read_text():
            (job,) = children(job)
        os.kill(job, signal.SIGUSR2)  # as submitit has Slurm do ahead of a time limit

    def has_resumed():
        if cluster == "slurm":  # which lets a requeued job wait for two minutes
            time.sleep(1)
            subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=False, capture_output=True)
        return "--resume" in next(checkout.glob("runs/sweep/stand_in__A-v0__1__*.log")).read_text()

    wait_until(has_resumed)
    pause.unlink()
    wait_until(lambda: len(runs_with(checkout, "scores.json")) == 2)
    assert len(runs_with(checkout, "args.json")) == 2
    code, said = finish(start(uninterrupted, *stand_ins(*flags, seeds=(1, 2))))
    assert code == 0 and table(checkout) == table(uninterrupted)


@needs_proc
def test_the_local_cluster_runs_as_many_as_there_are_workers(make_checkout, tmp_path):
    pytest.importorskip("submitit")
    checkout, pause = make_checkout(), tmp_path / "pause"
    pause.touch()
    words = ["--algos", "stand_in", "--env-ids", "A-v0", "--seeds", 1, 2, "--slurm", "cluster=local", "time=20", "--", "--pause", pause]
    process = start(checkout, *words)
    wait_until(lambda: len(runs_with(checkout, "checkpoint.pt")) == 1)
    time.sleep(3)  # in which the second would begin
    assert process.poll() is None and len(runs_with(checkout, "args.json")) == 1
    pause.unlink()
    code, said = finish(process)
    assert code == 0 and said.count("submitted stand_in A-v0") == 2, said
    wait_until(lambda: len(runs_with(checkout, "scores.json")) == 2)
