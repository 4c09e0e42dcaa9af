"""The whole paper on small MDPs: IRL, MMDP, NRMM and FILTER on a tree, and the paper's theory as tables and figures, in seconds to minutes.

Swamy, Choudhury, Bagnell and Wu, "Inverse Reinforcement Learning without Reinforcement Learning" (ICML 2023), in its notation. Algorithms: 1 IRL
dual, 2 IRL primal, 3 MMDP primal, 4 NRMM and FILTER, 5 MMDP dual, 6 NRMM dual. Equations: 1 MMDP's payoff, 9 the reward player's L(pi, f), 10 the
update of pi. The algorithms come first, on a tree; then exact values on any small MDP; then one function a claim.

    python algos/tabular.py tree         interactions until success against the horizon: A^T for IRL, polynomial with expert resets
    python algos/tabular.py alpha        the probability of an expert reset: what it saves on the tree, what it costs on the cliff
    python algos/tabular.py cliff        one early mistake costs eps T^2
    python algos/tabular.py dante        where looking ahead beats copying, and the payoff under which MMDP copies all the same
    python algos/tabular.py variance     the reward player's estimators: trajectories against suffixes

Each prints measured values beside closed forms and draws a figure. Signs: f is a *reward*, high on the expert. Time: decisions t = 1..T, arrays from
0. One interaction is one step of the environment; a reset is free.
"""

import math
import time
from collections import Counter, namedtuple
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro

# ========================================================================================================================================== args


@dataclass
class Args:
    claim: Annotated[Literal["tree", "alpha", "cliff", "dante", "variance"], tyro.conf.Positional]
    """what to run"""
    out: str = "runs/results/theory"
    """folder for the figure"""
    n_seeds: int = 10
    """tree, alpha: independent runs, each with its own expert and its own random streams"""
    n_actions: tuple[int, ...] = (2, 3)
    """tree: the |A|'s of the table"""
    horizons: tuple[int, ...] = ()
    """tree, alpha, cliff: the T's of the table (default: those of the README)"""
    eps: float = 0.01
    """alpha, cliff: average training error"""


def check(T, eps=0.0, A=2):
    """One sentence about the first number that can't be."""
    if T < 1:
        raise ValueError(f"T is {T}: give a horizon of at least 1")
    if A < 2:
        raise ValueError(f"|A| is {A}: give at least 2 actions")
    if not 0 <= eps * T <= 1:
        raise ValueError(f"eps T is {eps:g} * {T} = {eps * T:g}: it is a probability, give an eps from 0 to 1/T")


# ========================================================================================================================================== tree


class Tree:
    """The MDP of Theorem "Inverse RL Sample Complexity": a tree with |A| branches and depth T, deterministic; the expert ends in one leaf of A^T.

    F_r: the indicators of single leaves, without negations; the true reward r is that of the expert's leaf, so that J(pi) = prod_t pi(a*_t|s_t). The
    expert's action at each depth is drawn per seed: were it always the first, argmax's own way of breaking ties would find it.
    """

    def __init__(self, A, T, seed):
        check(T, A=A)
        self.A, self.T, self.n_steps, self.uniform = A, T, 0, [1 / A] * A
        self.expert_actions = np.random.default_rng((seed, 0)).integers(A, size=T).tolist()
        path = [0]  # node 0 is the root; the children of node s are s A + 1 .. s A + A
        for a in self.expert_actions:
            path.append(path[-1] * A + a + 1)
        self.expert_states, self.expert_leaf = path[:-1], path[-1]  # rho_E^t is the single state expert_states[t - 1]

    def step(self, s, a):
        self.n_steps += 1
        return s * self.A + a + 1

    def J(self, pi):
        """Exact, for the stop rule: not counted as interaction."""
        return math.prod(pi.get(s, self.uniform)[a] for s, a in zip(self.expert_states, self.expert_actions))


def start(A, T, seed):
    """The policy player's tree, the same tree for the reward player, counted apart, and a random stream for each."""
    return Tree(A, T, seed), Tree(A, T, seed), np.random.default_rng((seed, 1)), np.random.default_rng((seed, 2))


def roll_out(tree, pi, s, t, rng, t_end=None):
    """Follow pi from s_t to the leaf, or to s_{t_end}. pi: a dictionary from states to action probabilities, uniform in the states that it lacks."""
    for _ in range(t, t_end or tree.T + 1):
        u, a = rng.random(), 0
        probabilities = pi.get(s, tree.uniform)
        while a < tree.A - 1 and u >= probabilities[a]:
            u, a = u - probabilities[a], a + 1
        s = tree.step(s, a)
    return s


def root_leaves(tree, pi, rng, n=4):
    """What the reward player sees in an outer iteration: the leaves of 4 roll-outs from the root."""
    return [roll_out(tree, pi, 0, 1, rng) for _ in range(n)]


def best_response(tree, leaves, rng):
    """argmax_{f in F_r} L(pi, f) (Eq. 9), the learner's side estimated from `leaves`. An f is named by its leaf.

    L(pi, f) = 1[f is the expert's] - (share of roll-outs that ended in f): positive for the expert's leaf alone. Where all roll-outs ended there
    too it ties, at 0, with every leaf that nobody saw: then a random one is drawn. The dual algorithms call it on the leaves of all policies so far, without
    their regulariser R(f): follow the leader, which on this tree stays the expert's leaf as long as there is anything to learn.
    """
    if Counter(leaves)[tree.expert_leaf] < len(leaves):
        return tree.expert_leaf
    leaf = 0
    for _ in range(tree.T):
        leaf = leaf * tree.A + int(rng.integers(tree.A)) + 1
    return leaf


# ==================================================================================================================================== algorithms
# Each runs until J >= 0.5 (MMDP primal: to its end). Policy interactions and those of the reward player's root roll-outs are counted apart.

Run = namedtuple("Run", "policy_steps reward_steps iterations J")
LIMIT = 10**6  # policy interactions after which the algorithms that may need luck give up


def one_hot(a, A):
    return [float(b == a) for b in range(A)]


def random_argmax(values, rng):
    best = [a for a, value in enumerate(values) if value > max(values) - 1e-12]
    return best[int(rng.integers(len(best)))]


def explore(tree, paying, repeat, rng):
    """The RL oracle of Algorithms 1 and 2 (no entropy): roll out uniformly from the root until a leaf of `paying` is found; without `repeat`, no leaf twice.

    A path of uniform actions ends in a uniform leaf, so leaves are drawn, in batches, and their steps counted up to the first that pays.
    """
    n_leaves = tree.A**tree.T
    while True:
        leaves = (n_leaves - 1) // (tree.A - 1) + (rng.integers(n_leaves, size=2**14) if repeat else rng.permutation(n_leaves))
        hits = np.flatnonzero(np.isin(leaves, paying))
        tree.n_steps += tree.T * int(hits[0] + 1 if len(hits) else len(leaves))
        if len(hits):
            return int(leaves[hits[0]])


def irl(A, T, seed, variant="dual", repeat=True):
    """Algorithms 1 (dual) and 2 (primal): each outer iteration solves RL from the root: T A^T interactions on average, or T (A^T + 1)/2."""
    tree, reward_tree, rng, reward_rng = start(A, T, seed)
    pi, fs, leaves = {}, [], []
    while tree.J(pi) < 0.5:
        new = root_leaves(reward_tree, pi, reward_rng)
        leaves = leaves + new if variant == "dual" else new  # dual: f against Unif(pi_1:i); primal: against pi_i, at first the uniform policy
        fs.append(best_response(tree, leaves, reward_rng))
        r = Counter(fs[-1:] if variant == "dual" else fs)  # dual: f_i; primal: i times the mean of f_1:i
        leaf = explore(tree, [f for f in r if r[f] == max(r.values())], repeat, rng)
        pi = {}
        for _ in range(T):  # the deterministic policy that walks to this leaf
            leaf, a = divmod(leaf - 1, A)
            pi[leaf] = one_hot(a, A)
    return Run(tree.n_steps, reward_tree.n_steps, len(fs), tree.J(pi))


def ftrl(pi, D, s, a, q_hat, A):
    """Eq. 10 after one more sample (s, a, Q-hat): pi(.|s) <- argmax n(s) E_{a ~ pi}[Qbar(s, a)] + H(pi), so that pi(a|s) ~ exp(n(s) Qbar(s, a)).

    A sum over D, as in NRPI, in place of Eq. 10's mean, under which the entropy would never fade.
    n(s) counts the samples at s; Qbar(s, a) is the mean Q-hat of those with action a, 0 for an action that was never tried.
    """
    counts, sums = D.setdefault(s, ([0] * A, [0.0] * A))
    counts[a] += 1
    sums[a] += q_hat
    logits = [sum(counts) * total / max(1, n) for n, total in zip(counts, sums)]
    weights = [math.exp(logit - max(logits)) for logit in logits]
    pi[s] = [w / sum(weights) for w in weights]


def nrmm(A, T, seed, adversary="BR", alpha=1.0, n_rollouts=16):
    """Algorithm 4. NRMM(BR): f against the current policy; NRMM(NR): f against all policies so far. With alpha < 1 it is FILTER(alpha)."""
    tree, reward_tree, rng, reward_rng = start(A, T, seed)
    pi, D, leaves, i = {}, {}, [], 0
    while tree.J(pi) < 0.5 and tree.n_steps < LIMIT:
        D_i = []
        for _ in range(n_rollouts):
            t = int(rng.integers(1, T + 1))
            # With probability alpha s_t ~ rho_E^t, a reset; otherwise s_t ~ rho_pi^t, a roll-in from the root that costs t - 1 interactions.
            s = tree.expert_states[t - 1] if rng.random() < alpha else roll_out(tree, pi, 0, 1, rng, t)
            a = int(rng.integers(A))
            D_i.append((s, a, roll_out(tree, pi, tree.step(s, a), t + 1, rng)))
        new = root_leaves(reward_tree, pi, reward_rng)
        leaves = leaves + new if adversary == "NR" else new
        f = best_response(tree, leaves, reward_rng)
        for s, a, leaf in D_i:
            ftrl(pi, D, s, a, float(leaf == f), A)  # Q-hat is f at the leaf: before it f is 0
        i += 1
    return Run(tree.n_steps, reward_tree.n_steps, i, tree.J(pi))


def nrmm_dual(A, T, seed, M=None, judge="mixture"):
    """Algorithm 6: f_i against the mixture of all policies so far, then NRPI on f_i alone: M roll-outs from expert states, a new policy after each.

    D_i starts empty, as printed, so that only pi_i^1 = pi_{i-1} carries over what was learned: M (4 T^2 by default) must be enough for a fresh
    start. pi_i is the best of pi_i^1:M on validation data, by the likelihood of a held-out demonstration, which on this tree equals J. The paper
    returns the uniform mixture of the pi_i, one draw an episode: judge="mixture" runs until its J is 0.5, judge="policy" until the newest pi_i's is.
    """
    tree, reward_tree, rng, reward_rng = start(A, T, seed)
    M = M or 4 * T * T
    pi, leaves, Js, J = {}, [], [], 0.0
    while J < 0.5 and tree.n_steps < LIMIT:
        leaves += root_leaves(reward_tree, pi, reward_rng)
        f = best_response(tree, leaves, reward_rng)
        pi_j, next_pi, D_i = pi, {}, {}
        for _ in range(M):
            t, a = int(rng.integers(1, T + 1)), int(rng.integers(A))
            s = tree.expert_states[t - 1]
            leaf = roll_out(tree, pi_j, tree.step(s, a), t + 1, rng)
            ftrl(next_pi, D_i, s, a, float(leaf == f), A)
            pi_j = next_pi
            if tree.J(pi_j) > tree.J(pi):
                pi = dict(pi_j)
        Js.append(tree.J(pi))
        J = Js[-1] if judge == "policy" else sum(Js) / len(Js)
    return Run(tree.n_steps, reward_tree.n_steps, len(Js), J)


def enough(A, T):
    """MMDP's M: with probability 0.99 or more, M roll-outs a timestep try the expert's action at every t."""
    return math.ceil(math.log(T / 0.01) / math.log(A / (A - 1)))


def mmdp(A, T, seed, M=None, payoff="paper", each_action_once=False):
    """Algorithm 3: backwards in time, pi^t solves the game of Eq. 1 on M roll-outs from s_t ~ rho_E^t: M T (T + 1)/2 interactions.

    Over deterministic pi^t, ties broken at random. payoff="paper", as printed: the expert's *action* and then the learner's suffix, against the
    learner. payoff="suffix", a departure: the expert's own recorded suffix, against the learner. The first action of a roll-out is random; with
    each_action_once every action is tried once instead (M = |A|), and no luck is needed.
    """
    tree, _, rng, _ = start(A, T, seed)
    M, pi = A if each_action_once else M or enough(A, T), {}
    for t in range(T, 0, -1):
        s, D_t = tree.expert_states[t - 1], []
        for a in range(A) if each_action_once else rng.integers(A, size=M).tolist():
            D_t.append((a, roll_out(tree, pi, tree.step(s, a), t + 1, rng)))
        n, n_leaf = Counter(a for a, _ in D_t), Counter(D_t)

        def q(f, a, n=n, n_leaf=n_leaf):  # E_{D_t|s_t, a}[sum_{t..T} f], 0 for an action that was never tried
            return n_leaf[a, f] / max(1, n[a])

        F_r = {leaf for _, leaf in D_t} | {tree.expert_leaf}  # other unseen leaves add nothing; without any, an untried a*_t would not be a tie
        expert = {f: q(f, tree.expert_actions[t - 1]) if payoff == "paper" else float(f == tree.expert_leaf) for f in F_r}
        values = [max(expert[f] - q(f, a) for f in F_r) / T for a in range(A)]
        pi[s] = one_hot(random_argmax([-value for value in values], rng), A)
    return Run(tree.n_steps, 0, 1, tree.J(pi))


def mmdp_dual(A, T, seed, M=None):
    """Algorithm 5: f_i against the mixture of all policies so far, then PSDP on f_i alone: M (T (T + 1)/2 - 1) interactions an outer iteration.

    As printed, t = T needs no roll-out: f_i(s_T, a) is known. Two slips of the listing are mended: D_t is emptied in each outer iteration, and
    holds roll-outs from s_t. Returned: the uniform mixture of the pi_i, one draw an episode; J is the mixture's.
    """
    tree, reward_tree, rng, reward_rng = start(A, T, seed)
    M = M or enough(A, T)
    pi, leaves, Js, J = {}, [], [], 0.0
    while J < 0.5 and tree.n_steps < LIMIT:
        leaves += root_leaves(reward_tree, pi, reward_rng)
        f, pi = best_response(tree, leaves, reward_rng), {}
        for t in range(T, 0, -1):
            s = tree.expert_states[t - 1]
            D_t = [] if t == T else rng.integers(A, size=M).tolist()
            q = [float(t == T and s * A + a + 1 == f) for a in range(A)]
            for a in D_t:
                q[a] += (roll_out(tree, pi, tree.step(s, a), t + 1, rng) == f) / D_t.count(a)
            pi[s] = one_hot(random_argmax(q, rng), A)
        Js.append(tree.J(pi))
        J = sum(Js) / len(Js)
    return Run(tree.n_steps, reward_tree.n_steps, len(Js), J)


# ======================================================================================================================== exact values: any MDP


@dataclass
class MDP:
    """P (S, A, S), r (S, A), the horizon, the expert's policy, and the state in which episodes start. Policies change with time: (T, S, A)."""

    P: np.ndarray
    r: np.ndarray
    T: int
    pi_E: np.ndarray
    start: int = 0


def q_values(mdp, pi, f):
    """Q_f^{pi^t..pi^T}(s, a), t = 1..T: (T, S, A)."""
    q, v = np.zeros(pi.shape), np.zeros(len(mdp.P))
    for t in reversed(range(mdp.T)):
        q[t] = f + mdp.P @ v
        v = (pi[t] * q[t]).sum(-1)
    return q


def visitation(mdp, pi):
    """rho_pi^t(s), t = 1..T: (T, S)."""
    rho = np.zeros(pi.shape[:2])
    rho[0, mdp.start] = 1
    for t in range(mdp.T - 1):
        rho[t + 1] = np.einsum("s,sa,sax->x", rho[t], pi[t], mdp.P)
    return rho


def gap(mdp, pi):
    """J(pi_E, r) - J(pi, r)."""
    J_E, J = ((visitation(mdp, policy)[..., None] * policy * mdp.r).sum() for policy in (mdp.pi_E, pi))
    return float(J_E - J)


def mmdp_payoff(mdp, pi, t, F_r, payoff="paper"):
    """Eq. 1 at pi: max_f E_{s ~ rho_E^t}[E_{a ~ pi_E}[Q_f(s, a)] - E_{a ~ pi^t}[Q_f(s, a)]] / T, the first Q_f of pi ("paper") or pi_E ("suffix")."""
    rho, values = visitation(mdp, mdp.pi_E)[t - 1], []
    for f in F_r:
        q, q_first = (q_values(mdp, policy, f)[t - 1] for policy in (pi, pi if payoff == "paper" else mdp.pi_E))
        values.append(rho @ (mdp.pi_E[t - 1] * q_first - pi[t - 1] * q).sum(-1) / mdp.T)
    return float(max(values))


def training_error(mdp, pi, alpha):
    """The error that training sees: with probability alpha NRMM's, the mean payoff over t; otherwise IRL's, (J(pi_E) - J(pi))/T from the start.

    By the performance-difference lemma NRMM's is (J(pi_E) - J(pi))/T^2. So at error eps the gap is eps T^2/(alpha + (1 - alpha) T). This trade-off is
    ours, not the paper's.
    """
    return alpha * np.mean([mmdp_payoff(mdp, pi, t, [mdp.r]) for t in range(1, mdp.T + 1)]) + (1 - alpha) * gap(mdp, pi) / mdp.T


def make_cliff(T, eps, every_step=False):
    """Cliff: a_1 goes on, a_2 falls to s_x for good; r = -1[s_x] - 1[a_2]. The expert plays a_1. The policy returned beside the MDP plays a_2 in s_0
    with probability eps T (every_step: in each of s_0..s_{T-1} with probability eps), and a_1 elsewhere."""  # fmt: skip
    check(T)
    check(1 if every_step else T, eps)
    P, r, pi_E = np.zeros((T + 1, 2, T + 1)), np.zeros((T + 1, 2)), np.zeros((T, T + 1, 2))
    P[range(T - 1), 0, range(1, T)] = P[T - 1 :, 0, T] = P[:, 1, T] = 1  # s_x is state T; what follows the last decision does not matter
    r[T, :] -= 1
    r[:, 1] -= 1
    pi_E[..., 0] = 1
    pi, p = pi_E.copy(), eps if every_step else eps * T
    pi[:, : T if every_step else 1] = 1 - p, p
    return MDP(P, r, T, pi_E), pi


UP, STAY, DOWN = range(3)


def make_dante(T, eps, first=STAY):
    """Dante: rows top, centre, bottom; r = 1 if the row after the action is top or centre. The expert stays in the centre. The policy returned beside
    the MDP plays `first` at t = 1, goes down with probability eps T at t = 2, then stays. Behavioural cloning's first action is STAY."""  # fmt: skip
    check(T, eps)
    after = np.clip(np.arange(3)[:, None] + (-1, 0, 1), 0, 2)  # (row, action) -> row
    pi_E = np.tile(one_hot(STAY, 3), (T, 3, 1))
    pi = pi_E.copy()
    pi[0] = one_hot(first, 3)
    pi[1:2] = 0, 1 - eps * T, eps * T
    return MDP(np.eye(3)[after], (after < 2).astype(float), T, pi_E, start=1), pi


def dante_payoffs(T, eps):
    """Eq. 1 at t = 1 for each first action, with either payoff, for F_r = {r} and closed under negation: {(payoff, F_r): [up, stay, down]}."""
    pairs = [make_dante(T, eps, first) for first in (UP, STAY, DOWN)]
    return {(payoff, name): [mmdp_payoff(mdp, pi, 1, [sign * mdp.r for sign in signs], payoff) for mdp, pi in pairs]
            for payoff in ("paper", "suffix") for name, signs in (("{r}", (1,)), ("{r, -r}", (1, -1)))}  # fmt: skip


ESTIMATORS = ("suffixes as described", "suffixes as written", "trajectories, T roll-outs", "trajectory, one roll-out")


def variance_settings(T, T_cliff, q):
    """{setting: (T, learner, expert, the ESTIMATORS' variances)}. learner(rng, n, t), expert(rng, n, t): r_t..r_T of n roll-outs from rho_E^t."""

    def independent(rng, n, t):
        return rng.normal(size=(n, T - t + 1))

    def deterministic(rng, n, t):
        return rng.normal(size=(n, 1)) * np.ones(T - t + 1)

    def alternating(rng, n, t):
        return rng.normal(size=(n, 1)) * (-1.0) ** np.arange(t, T + 1)

    def fall(rng, n, t, q=q):  # Cliff: the learner falls in s_0 with probability q, the expert (q = 0) never
        return (rng.random((n, 1)) < q) * -float(t == 1) * np.ones(T_cliff - t + 1)

    v = q * (1 - q)
    return {
        "independent": (T, independent, independent, (T * (T + 1), T * (T - 1), 2 * T, 2 * T)),
        "deterministic": (T, deterministic, deterministic, (T * (T + 1) * (2 * T + 1) / 3, (T - 1) * T * (2 * T - 1) / 3, 2 * T, 2 * T**2)),
        "alternating": (T, alternating, alternating, (2 * ((T + 1) // 2), 2 * (T // 2), 2 * T, 2 * (T % 2))),
        "cliff": (T_cliff, fall, partial(fall, q=0), (T_cliff**2 * v, (T_cliff - 1) ** 2 * v, T_cliff * v, T_cliff**2 * v)),
    }


def estimate(estimator, T, learner, expert, n, rng):
    """n draws of an estimate of J(pi) - J(pi_E) (Theorem "var"). Described, the paper's suffix has T - t + 1 terms; written, it has T - t."""
    if estimator == "trajectory, one roll-out":
        return (learner(rng, n, 1) - expert(rng, n, 1)).sum(1)
    if estimator == "trajectories, T roll-outs":
        return sum(learner(rng, n, 1)[:, t] - expert(rng, n, 1)[:, t] for t in range(T))
    n_terms = [T - t + (estimator == "suffixes as described") for t in range(1, T + 1)]
    return sum((learner(rng, n, t)[:, :k] - expert(rng, n, t)[:, :k]).sum(1) for t, k in enumerate(n_terms, 1))


# ======================================================================================================================================== claims


def show(header, rows):
    cells = [[x if isinstance(x, str) else f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.6g}" for x in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    print("\n".join("  ".join(x.rjust(w) if i else x.ljust(w) for i, (x, w) in enumerate(zip(row, widths))) for row in cells), "\n")


def draw(args, *panels):
    """One figure. A panel: the settings of its axes, and its curves, each (x, y, format, label)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(5.5 * len(panels), 4.5), layout="constrained", squeeze=False)
    for ax, (settings, curves) in zip(axes[0], panels):
        for x, y, style, label in curves:
            ax.plot(x, y, style, label=label, markersize=12 if style == "ko" else 5, fillstyle="none" if style == "ko" else "full")
        if settings.get("yscale") == "symlog":
            ax.set_yscale("symlog", linthresh=settings.pop("linthresh", 10))  # linear below, so that 0 has a place
            del settings["yscale"]
        ax.set(**settings)
        if len(curves) < 12:
            ax.legend(fontsize=8)
    if len(curves) >= 12:  # too many for a place inside: one legend for all panels
        figure.legend(*ax.get_legend_handles_labels(), loc="outside right center", fontsize=8)
    path = Path(args.out) / f"{args.claim}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"figure: {path}")


# name: (algorithm, its closed form, the most leaves that it is run on)
TREE_TABLE = {
    "IRL, uniform exploration": (irl, lambda A, T: T * A**T, 2**20),
    "IRL, never a leaf twice": (partial(irl, repeat=False), lambda A, T: T * (A**T + 1) / 2, 2**20),
    "FILTER, alpha 0": (partial(nrmm, alpha=0.0), None, 2**12),
    "FILTER, alpha 0.5": (partial(nrmm, alpha=0.5), None, math.inf),
    "NRMM(BR)": (nrmm, None, math.inf),
    "NRMM(NR)": (partial(nrmm, adversary="NR"), None, math.inf),
    "NRMM dual, M = 4 T^2": (nrmm_dual, None, math.inf),
    "NRMM dual, M = 16 T": (lambda A, T, seed: nrmm_dual(A, T, seed, 16 * T), None, 2**20),
    "NRMM dual, M = 16 T, newest": (lambda A, T, seed: nrmm_dual(A, T, seed, 16 * T, "policy"), None, 2**20),
    "MMDP": (mmdp, lambda A, T: enough(A, T) * T * (T + 1) / 2, math.inf),
    "MMDP, each action once": (partial(mmdp, each_action_once=True), lambda A, T: A * T * (T + 1) / 2, math.inf),
    "MMDP dual": (mmdp_dual, lambda A, T: enough(A, T) * (T * (T + 1) / 2 - 1), math.inf),
}


def growth(T, n):
    """Fits of n = T 2^(b T) and of n = T^c: b, rms residual of ln n, c, rms residual of ln n, and c from T >= 16 alone."""
    T, log_n = np.array(T), np.log(n)
    fits = [(np.polyfit(x, y, 1), x, y) for x, y in ((T, log_n - np.log(T)), (np.log(T), log_n))]
    (b, rms_b), (c, rms_c) = ((line[0], np.sqrt(np.mean((np.polyval(line, x) - y) ** 2))) for line, x, y in fits)
    late = T >= 16
    return b / math.log(2), rms_b, c, rms_c, np.polyfit(np.log(T[late]), log_n[late], 1)[0] if late.sum() > 1 else "-"


def tree(args):
    """Theorem "Inverse RL Sample Complexity" and the sample-complexity lemmas: interactions until J >= 0.5."""
    panels = []
    for A in args.n_actions:
        Ts = args.horizons or ((4, 8, 12, 16, 24, 32) if A == 2 else (4, 8, 12))
        rows, fits, curves = [], [], [(Ts, [0] * len(Ts), "k-", "BC: 0")]
        styles = [color + marker for color, marker in zip((*(f"C{k}" for k in range(10)), "m", "k"), "os^vD*<>hpPX")]
        for (name, (algorithm, closed_form, max_leaves)), style in zip(TREE_TABLE.items(), styles):
            is_irl = "IRL" in name  # its luck is geometric: the mean over ten runs says little, and more runs are cheap
            cpu, cells, measured, n_runs, n_solved = time.process_time(), [], {}, 0, 0
            for T in Ts:
                runs = [algorithm(A, T, seed) for seed in range(args.n_seeds * (20 if is_irl else 1))] if A**T <= max_leaves else []
                n_runs, n_solved = n_runs + len(runs), n_solved + sum(run.J >= 0.5 for run in runs)
                if runs:
                    measured[T], reward_steps = (np.mean if is_irl else np.median)(runs, axis=0)[:2]
                cells.append(f"{measured[T]:.0f}+{reward_steps:.0f}" if runs else "-")
            rows.append([name, *cells, f"{n_solved}/{n_runs}", f"{time.process_time() - cpu:.1f}"])
            if closed_form:
                rows.append(["    closed form", *(f"{closed_form(A, T):.6g}   " for T in Ts), "", ""])
                curves.append((Ts, [closed_form(A, T) for T in Ts], style[:-1] + "--", None))
            if len(measured) > 2 and min(measured.values()) > 0:
                fits.append([name, *growth(list(measured), list(measured.values()))])
            curves.append((list(measured), list(measured.values()), style + ("" if closed_form else "-"), name))
        rows.append(["BC, which needs none here", *("0   " for _ in Ts), "", ""])
        print(f"|A| = {A}: interactions (policy + reward player) until J >= 0.5, median of {args.n_seeds} seeds; IRL: mean of {20 * args.n_seeds}")
        show(["", *(f"T={T}" for T in Ts), "solved", "CPU s"], rows)
        if fits:
            print("Growth of the policy interactions: n = T 2^(b T), or n = T^c; rms: residual of ln n")
            show(["", "b", "rms", "c", "rms", "c, T >= 16"], fits)
        settings = {"xlabel": "T", "xticks": Ts, "ylabel": "policy interactions until J >= 0.5", "yscale": "symlog"}
        panels.append((settings | {"title": f"Tree, |A| = {A}; dashed: closed form"}, curves))
    print("The lower bound needs this sparse class: rewards at every node, not only at leaves, could lead a learner down the path.")
    print("NRMM dual forgets its data at each outer iteration, which must be long enough: M = 16 T soon is not, and luck decides.")
    print('"newest" stops when the newest policy reaches J >= 0.5, not the mixture that the algorithm returns.')
    draw(args, *panels)


def alpha(args):
    """What expert resets save in exploration, on the tree, and what they cost in compounding errors, on the cliff (see training_error)."""
    alphas, x, eps, rows, tree_curves, cliff_curves = np.array((0, 0.1, 0.25, 0.5, 0.75, 1)), np.linspace(0, 1, 101), args.eps, [], [], []
    if eps == 0:
        raise ValueError("eps is 0: without an error there is no cost to show, give an eps above 0")
    for k, T in enumerate(args.horizons or (8, 12)):
        n = [np.median([nrmm(2, T, seed, alpha=a).policy_steps for seed in range(args.n_seeds)]) for a in alphas]
        # The error is linear in the probability of the mistake: scale that until the error is eps.
        gaps = [gap(*make_cliff(T, eps * eps / training_error(*make_cliff(T, eps), a))) for a in alphas]
        rows += [[f"T={T}, alpha={a}", *row] for a, *row in zip(alphas, n, gaps, eps * T**2 / (alphas + (1 - alphas) * T))]
        tree_curves.append((alphas, n, f"C{k}o-", f"T = {T}"))
        cliff_curves += [(alphas, gaps, f"C{k}o", f"T = {T}"), (x, eps * T**2 / (x + (1 - x) * T), f"C{k}--", None)]
    show(["", "tree: interactions", f"cliff: gap at eps={eps:g}", "eps T^2/(alpha + (1-alpha) T)"], rows)
    tree_settings = {"ylabel": "policy interactions until J >= 0.5", "yscale": "log", "title": f"Tree, |A| = 2, median of {args.n_seeds} seeds"}
    cliff_settings = {"ylabel": "J(pi_E) - J(pi)", "title": f"Cliff, training error {eps:g}; dashed: closed form"}
    draw(args, (tree_settings | {"xlabel": "alpha"}, tree_curves), (cliff_settings | {"xlabel": "alpha"}, cliff_curves))


def cliff(args):
    """Theorems "MMDP Lower Bound" and "NRMM Lower Bound": an average error of eps becomes a gap of eps T^2."""
    Ts, eps, rows = args.horizons or (5, 10, 20, 50, 100), args.eps, []
    for T in Ts:
        (mdp, pi), every_step = make_cliff(T, eps), make_cliff(T, eps, every_step=True)
        closed_form = T - (1 - eps) * (1 - (1 - eps) ** T) / eps if eps else 0.0
        rows.append([T, mmdp_payoff(mdp, pi, 1, [mdp.r]), training_error(mdp, pi, 1), gap(mdp, pi), eps * T**2, gap(*every_step), closed_form])
    print(f"eps = {eps:g}: a_2 in s_0 with probability eps T, or with probability eps at every step")
    show(["T", "eps_1", "mean eps_t", "gap", "eps T^2", "gap, every step", "closed form"], rows)
    columns = list(zip(*rows))
    curves = [(Ts, columns[3], "C0o", "one early mistake, probability eps T"), (Ts, columns[4], "C0--", None),
              (Ts, columns[5], "C1o", "the mistake with probability eps at every step"), (Ts, columns[6], "C1--", None)]  # fmt: skip
    settings = {"xlabel": "T", "ylabel": "J(pi_E) - J(pi)", "xscale": "log", "yscale": "log"}
    draw(args, (settings | {"title": f"Cliff, eps = {eps:g}; dashed: closed form"}, curves))


def dante(args):
    """MMDP against behavioural cloning: it sees that going up is safe; but with F_r closed under negation the payoff as printed copies the expert."""
    T, eps, names = 10, 0.02, ("up", "stay", "down")
    gaps = [gap(*make_dante(T, eps, first)) for first in (UP, STAY, DOWN)]
    table = dante_payoffs(T, eps)
    print(f"Dante, T = {T}, eps = {eps}: the payoff of each first action; the lowest is chosen")
    show(["payoff", "F_r", *names, "choice", "gap"], [[*name, *v, names[np.argmin(v)], gaps[np.argmin(v)]] for name, v in table.items()])
    cases = ((5, 0.05), (10, 0.02), (20, 0.01), (50, 0.01))
    show(["BC's gap", "exact", "eps T (T-1)"], [[f"T={T}, eps={eps}", gap(*make_dante(T, eps)), eps * T * (T - 1)] for T, eps in cases])
    ticks = [f"{payoff}\n{F_r}" for payoff, F_r in table]
    curves = [(ticks, [v[a] for v in table.values()], f"C{a}{marker}", f"first action {names[a]}") for a, marker in enumerate("^sv")]
    curves.append((ticks, [min(v) for v in table.values()], "ko", "chosen"))
    draw(args, ({"ylabel": "payoff (the lowest is chosen)", "title": f"Dante, T = {T}, eps = {eps}: gap of up 0, of stay {gaps[STAY]:.2g}"}, curves))


def variance(args):
    """Theorem "var", corrected: the paper counts T - t terms in one case and T - t + 1 in the other; and code takes one roll-out, not T."""
    settings, rng, n = variance_settings(T=8, T_cliff=10, q=0.2), np.random.default_rng(0), 100_000
    rows = []
    for name, (T, learner, expert, closed_forms) in settings.items():
        rows += [[f"{name}, T={T}", e, estimate(e, T, learner, expert, n, rng).var(), exact] for e, exact in zip(ESTIMATORS, closed_forms)]
    show(["rewards", "estimator", f"variance of {n:,} draws", "closed form"], rows)
    curves, x = [], np.arange(len(settings))
    for k, (e, marker) in enumerate(zip(ESTIMATORS, "^vso")):
        curves.append((x + 0.15 * (k - 1.5), [row[2] for row in rows[k::4]], f"C{k}{marker}", e))
        curves.append((x + 0.15 * (k - 1.5), [row[3] for row in rows[k::4]], "k_", None if k else "closed form"))
    axes = {"xticks": x, "xticklabels": list(settings), "ylabel": "variance", "yscale": "symlog", "linthresh": 1}
    draw(args, (axes | {"title": "Reward player's estimators, T = 8 (cliff: 10)"}, curves))


if __name__ == "__main__":
    args = tyro.cli(Args)
    try:
        {claim.__name__: claim for claim in (tree, alpha, cliff, dante, variance)}[args.claim](args)
    except ValueError as error:
        raise SystemExit(str(error)) from None
