"""Several algorithms, tasks and seeds, each run a process of one thread. Started again, it does only what is missing.

    python utils/sweep.py --algos bc mm_gail_ipm filter_br filter_nr --env-ids HopperBulletEnv-v0 --seeds 1 2 3 --workers 2
    python utils/sweep.py --algos filter_br --env-ids HopperBulletEnv-v0 --dry-run -- --alpha 0.25     flags after -- go to every script
    python utils/sweep.py --algos filter_br --env-ids HopperBulletEnv-v0 --slurm partition=cpu mem=4G  one cluster job a run (needs submitit)

A run is known by its script and *all* its arguments, as its args.json has them. With a scores.json it is finished; with a checkpoint.pt alone it was
interrupted, and is resumed; else it is started. Its output goes to runs/sweep/NAME.log, which it keeps locked for as long as it lives: what a killed
sweep has left running is waited for, not started twice.
"""

import csv
import fcntl
import hashlib
import importlib.util
import json
import os
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "runs"
OWN_FLAGS = ("--env-id", "--seed", "--torch-threads", "--resume", "--eval")
REPORT_EVERY = 60  # seconds
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


@dataclass
class Args:
    algos: tuple[str, ...]
    """scripts in algos/, without .py"""
    env_ids: tuple[str, ...]
    """tasks"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """a run of each algorithm on each task for each of them"""
    workers: int = 1
    """runs at a time, no more than there are cores"""
    dry_run: bool = False
    """print what would be run, and run nothing"""
    slurm: tuple[str, ...] = ()
    """submit a job a run instead, with these options of sbatch: NAME=VALUE, such as partition=cpu time=600 (minutes). cluster=local needs no Slurm"""


@dataclass(eq=False)
class Run:
    algo: str
    env_id: str
    seed: int
    flags: list
    """its command line"""
    args: dict
    """all its arguments, as args.json will have them"""

    def __post_init__(self):
        digest = hashlib.sha256(json.dumps(self.args, sort_keys=True).encode()).hexdigest()[:8]
        self.name = f"{self.algo} {self.env_id} seed {self.seed}"
        self.log = RUNS / "sweep" / f"{self.algo}__{self.env_id}__{self.seed}__{digest}.log".replace(":", "-").replace("/", "-")


def plan(args, extra):
    """The runs that are asked for. One sentence about the first thing that can't be, before anything is run."""
    if taken := [word for word in extra if word.split("=")[0].replace("_", "-") in OWN_FLAGS]:
        raise SystemExit(f"{taken[0]} is set by the sweep: leave it out after --")
    for name in ("algos", "env_ids", "seeds"):
        if not getattr(args, name):
            raise SystemExit(f"--{name.replace('_', '-')} names none: give at least one")
    if min(args.seeds) < 0:
        raise SystemExit(f"--seeds has {min(args.seeds)}: give whole numbers of at least 0")
    runs = []
    for algo in dict.fromkeys(args.algos):
        path = ROOT / "algos" / f"{algo}.py"
        if not path.exists():
            raise SystemExit(f"--algos {algo}: no such script, there are {', '.join(sorted(script.stem for script in path.parent.glob('[!_]*.py')))}")
        if algo in ("mmdp", "tabular"):
            raise SystemExit(f"--algos {algo}: it runs its own seeds and tables, and is not swept")
        spec = importlib.util.spec_from_file_location(algo, path)
        module = sys.modules[algo] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for env_id in dict.fromkeys(args.env_ids):
            for seed in dict.fromkeys(args.seeds):
                flags = ["--env-id", env_id, "--seed", str(seed), "--torch-threads", "1", *extra]
                script_args, unknown = tyro.cli(module.Args, args=flags, return_unknown_args=True)
                if unknown:
                    raise SystemExit(f"{unknown[0]} is no flag of algos/{algo}.py: sweep the scripts that have it on their own")
                if getattr(script_args, "demos", "") and Path(script_args.demos).exists():
                    script_args.demos = str(Path(script_args.demos).resolve())  # as the scripts do
                runs.append(Run(algo, env_id, seed, flags, json.loads(json.dumps(asdict(script_args)))))
            try:
                module.check_args(script_args)
            except SystemExit as refusal:
                raise SystemExit(f"{algo} {env_id}: {refusal}") from None
    return runs


def find(run):
    """Where this run stands: ("finished", folder), ("resume", the folder that a process is at or that is furthest on) or ("start", None)."""
    interrupted = []
    for path in RUNS.glob("*/args.json"):
        try:
            saved = dict(json.loads(path.read_text()))
        except (ValueError, TypeError):
            continue  # no run of ours
        if saved.get("exp_name") == run.algo and all(name in saved and saved[name] == value for name, value in run.args.items()):
            if (path.parent / "scores.json").exists():
                return "finished", path.parent
            held = is_held(path.parent)
            if held or (path.parent / "checkpoint.pt").exists():
                interrupted.append((held, len(metrics(path.parent)), path.parent))
    return ("resume", max(interrupted)[-1]) if interrupted else ("start", None)


def is_held(folder):
    """Whether a process is at this run, by the lock that the scripts hold."""
    if not (folder / "lock").exists():
        return False
    with open(folder / "lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            pass  # a file system without locks
    return False


def metrics(folder):
    """The rows of its metrics.csv, but one that is being written."""
    path = folder / "metrics.csv"
    return list(csv.DictReader(path.read_text().split("\n")[:-1])) if path.exists() else []


def command(run):
    state, folder = find(run)
    flags = ["--resume", os.path.relpath(folder)] if state == "resume" else run.flags
    return [os.path.relpath(ROOT / "algos" / f"{run.algo}.py"), *flags]


def progress(run):
    """How far the run is, and the last true return that it measured."""
    _, folder = find(run)
    rows = metrics(folder) if folder else []
    steps = (rows[-1].get("charts/gradient_steps") or rows[-1]["charts/timesteps"]) if rows else 0
    total = "".join(f"/{run.args[name]}" for name in ("total_timesteps", "total_gradient_steps") if name in run.args)
    returns = [f"return {float(row['eval/return']):.1f}" for row in rows if row.get("eval/return")]
    return f"{run.name:<45} {steps:>8}{total}  {''.join(returns[-1:])}"


def begin(run):
    """Start or resume the run: its process. None where it is finished, or another process is at it."""
    run.log.parent.mkdir(parents=True, exist_ok=True)
    with open(run.log, "ab") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the process inherits the open file, and with it the lock
        except BlockingIOError:
            return None
        except OSError:
            pass  # a file system without locks
        _, folder = find(run)
        if (folder and is_held(folder)) or find(run)[0] == "finished":
            return None
        words, files = command(run), {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        log.write(f"\n$ python {shlex.join(words)}\n".encode())
        log.flush()
        # In a session of its own: Ctrl-C reaches the sweep alone, which then ends its runs.
        return subprocess.Popen([sys.executable, *words], env=os.environ | ONE_THREAD, start_new_session=True, **files)


def sweep(runs, workers):
    """Run all of them, `workers` at a time. Returns those that failed."""
    waiting, active, failed, elsewhere, reported = list(runs), {}, [], [], time.time()
    try:
        while waiting or active:
            while waiting and len(active) < workers:
                active[waiting.pop(0)] = None
            for run, process in list(active.items()):
                if process and process.poll() is None:
                    continue
                state, folder = find(run)
                if state == "finished":
                    print(f"finished  {progress(run)}", flush=True)
                    del active[run]
                elif process and not (folder and is_held(folder)):  # or else another process has come first
                    print(f"FAILED    {run.name}, exit code {process.returncode}: {os.path.relpath(run.log)}", flush=True)
                    failed.append(run)
                    del active[run]
                else:
                    active[run] = begin(run)
                    if active[run] is None and run not in elsewhere:
                        elsewhere.append(run)
                        print(f"waiting   {run.name}: another process is at it", flush=True)
            if time.time() > reported + REPORT_EVERY:
                for run, process in active.items():
                    print(f"{'running' if process else 'elsewhere':<9} {progress(run)}", flush=True)
                reported = time.time()
            time.sleep(0.5)
    finally:
        for process in filter(None, active.values()):
            process.terminate()
            process.wait()
    return failed


@dataclass
class ClusterJob:
    """A run as a job: this script again, for that run alone, so that a job that is requeued resumes."""

    words: list

    def __call__(self):
        sys.argv = self.words
        runpy.run_path(self.words[0], run_name="__main__")

    def checkpoint(self):
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)  # what submitit requeues when Slurm warns it of the time limit: the same again


def submit(runs, options, extra, workers):
    """Hand the runs to Slurm, but those that it already has. With cluster=local, which queues nothing, at most `workers` run at once."""
    options = {"cluster": "slurm", "time": "1440", "cpus_per_task": "1"} | dict(option.split("=", 1) for option in options)
    cluster, minutes = options.pop("cluster"), options.pop("time")
    if not minutes.isdigit():
        raise SystemExit(f"--slurm time={minutes}: give whole minutes")
    if importlib.util.find_spec("submitit") is None:
        raise SystemExit("--slurm needs a package that is not installed: pip install submitit")
    if cluster == "slurm" and not shutil.which("sbatch"):
        raise SystemExit("--slurm needs sbatch, which this machine does not have: submit where the cluster's other jobs are submitted")
    import submitit

    squeue = ["squeue", "--me", "--noheader", "--format=%j"] if cluster == "slurm" else ["true"]
    queued = subprocess.run(squeue, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    options = {f"slurm_{name}": int(value) if value.isdigit() else value for name, value in options.items()}
    try:
        executor = submitit.AutoExecutor(RUNS / "sweep" / "jobs", cluster=cluster, slurm_max_num_timeout=1000)
        executor.update_parameters(timeout_min=int(minutes), **options)
    except (NameError, ValueError) as error:  # which name the option
        raise SystemExit(f"--slurm: {' '.join(str(error).split())}") from None
    jobs = []
    for run in runs:
        if run.log.stem in queued:
            print(f"queued    {run.name}")
        else:
            executor.update_parameters(name=run.log.stem)
            words = [str(Path(__file__).resolve()), "--algos", run.algo, "--env-ids", run.env_id, "--seeds", str(run.seed), "--", *extra]
            if cluster == "local" and len(jobs) >= workers:
                jobs[-workers].wait()
            jobs.append(executor.submit(ClusterJob(words)))
            print(f"submitted {run.name}: job {jobs[-1].job_id}, {os.path.relpath(run.log)}")


def main():
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, extra = tyro.cli(Args, args=sys.argv[1:split]), sys.argv[split + 1 :]
    cores = os.cpu_count()
    if not 1 <= args.workers <= cores:
        raise SystemExit(f"--workers is {args.workers}: give 1 to {cores}, the cores of this machine")
    if bad := [option for option in args.slurm if "=" not in option]:
        raise SystemExit(f"--slurm {bad[0]}: give NAME=VALUE, such as partition=cpu")
    states = {run: find(run) for run in plan(args, extra)}
    for run, (state, folder) in states.items():
        print(f"{state:<9} " + (os.path.relpath(folder) if state == "finished" else shlex.join(["python", *command(run)])), flush=True)
    missing = [run for run, (state, _) in states.items() if state != "finished"]
    if args.dry_run:
        return
    if args.slurm:
        return submit(missing, args.slurm, extra, args.workers)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        failed = sweep(missing, args.workers)
    except KeyboardInterrupt:
        raise SystemExit("interrupted, and its runs with it: the same command goes on") from None
    if failed:
        raise SystemExit("\n".join([f"{len(failed)} of {len(missing)} runs failed:", *(f"  {run.name}: {os.path.relpath(run.log)}" for run in failed)]))


if __name__ == "__main__":
    main()
