"""algos/tabular.py by value: exact numbers of the paper's theory, corrected where its formulas slip, and the algorithms on the tree."""

import itertools
import math
import runpy
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from algos import tabular
from algos.tabular import (
    DOWN,
    ESTIMATORS,
    MDP,
    STAY,
    UP,
    Args,
    Tree,
    best_response,
    dante_payoffs,
    enough,
    estimate,
    ftrl,
    gap,
    growth,
    irl,
    make_cliff,
    make_dante,
    mmdp,
    mmdp_dual,
    mmdp_payoff,
    nrmm,
    nrmm_dual,
    q_values,
    random_argmax,
    roll_out,
    training_error,
    variance_settings,
)

ROOT = Path(__file__).resolve().parents[1]


def random_mdp(seed, n_states=4, n_actions=3, T=5):
    """A random MDP and a random policy; both policies change with time."""
    rng = np.random.default_rng(seed)
    pi_E, pi = rng.dirichlet(np.ones(n_actions), size=(2, T, n_states))
    P = rng.dirichlet(np.ones(n_states), size=(n_states, n_actions))
    return MDP(P, rng.uniform(-1, 1, (n_states, n_actions)), T, pi_E, start=int(rng.integers(n_states))), pi


def enumerate_return(mdp, policies, f, s, t=0):
    """The expected sum of f from s_t on, path by path; policies[t] acts at t."""
    if t == len(policies):
        return 0.0
    return sum(
        policies[t][s, a] * (f[s, a] + sum(mdp.P[s, a, x] * enumerate_return(mdp, policies, f, x, t + 1) for x in range(len(mdp.P))))
        for a in range(mdp.P.shape[1])
    )


# ------------------------------------------------------------------------------------------------------------------- exact values on any MDP


def test_values_agree_with_an_enumeration_of_paths():
    mdp, pi = random_mdp(0, n_states=2, n_actions=2, T=4)
    J_E, J = (enumerate_return(mdp, list(policy), mdp.r, mdp.start) for policy in (mdp.pi_E, pi))
    assert gap(mdp, pi) == pytest.approx(J_E - J, abs=1e-12)
    f = np.random.default_rng(1).normal(size=(2, 2))
    for t, s, a in itertools.product(range(4), range(2), range(2)):
        expected = f[s, a] + sum(mdp.P[s, a, x] * enumerate_return(mdp, list(pi), f, x, t + 1) for x in range(2))
        assert q_values(mdp, pi, f)[t, s, a] == pytest.approx(expected, abs=1e-12)


def test_payoffs_agree_with_an_enumeration_of_paths():
    """Eq. 1: roll in with the expert, then its action and pi's suffix (or its own suffix), against pi; what the roll-ins earn cancels."""
    mdp, pi = random_mdp(3, n_states=2, n_actions=2, T=4)
    E, L = list(mdp.pi_E), list(pi)
    fs = [np.random.default_rng(k).normal(size=(2, 2)) for k in range(3)]
    for t in range(1, 5):
        learner, paper, suffix = ([enumerate_return(mdp, who, f, mdp.start) for f in fs] for who in (E[: t - 1] + L[t - 1 :], E[:t] + L[t:], E))
        assert mmdp_payoff(mdp, pi, t, fs) == pytest.approx(max(np.subtract(paper, learner)) / 4, abs=1e-12)
        assert mmdp_payoff(mdp, pi, t, fs, "suffix") == pytest.approx(max(np.subtract(suffix, learner)) / 4, abs=1e-12)


def test_performance_difference_identity():
    """J(pi_E) - J(pi) = T sum_t payoff_t(r) on 200 random MDPs."""
    for seed in range(200):
        mdp, pi = random_mdp(seed)
        assert gap(mdp, pi) == pytest.approx(mdp.T * sum(mmdp_payoff(mdp, pi, t, [mdp.r]) for t in range(1, mdp.T + 1)), abs=1e-12)
        assert gap(mdp, mdp.pi_E) == 0


def test_training_error_mixes_both_errors():
    mdp, pi = random_mdp(7)
    for alpha in (0, 0.3, 1):
        assert training_error(mdp, pi, alpha) == pytest.approx(gap(mdp, pi) * (alpha / mdp.T**2 + (1 - alpha) / mdp.T), abs=1e-12)


# ----------------------------------------------------------------------------------------------------------------------------------- the cliff


@pytest.mark.parametrize("T, expected", [(5, 0.25), (10, 1), (20, 4), (50, 25), (100, 100)])
def test_cliff_gap(T, expected):
    """One early mistake: eps_1 = eps T, the other eps_t are 0, their mean, which is NRMM's error too, is eps, and the gap is eps T^2."""
    mdp, pi = make_cliff(T, 0.01)
    if T <= 20:
        payoffs = [mmdp_payoff(mdp, pi, t, [mdp.r]) for t in range(1, T + 1)]
        np.testing.assert_allclose(payoffs, [0.01 * T] + [0] * (T - 1), atol=1e-12)
        assert training_error(mdp, pi, 1) == pytest.approx(0.01, abs=1e-12)
    assert gap(mdp, pi) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("T, expected", [(10, 0.533825), (50, 10.895601), (100, 37.237202)])
def test_cliff_gap_with_a_mistake_at_every_step(T, expected):
    assert gap(*make_cliff(T, 0.01, every_step=True)) == pytest.approx(expected, abs=5e-7)
    assert gap(*make_cliff(T, 0.01, every_step=True)) == pytest.approx(T - 0.99 * (1 - 0.99**T) / 0.01, abs=1e-9)


def test_cliff_step_by_step():
    """a_1 goes on and pays 0; a_2 pays -1 and leads to s_x, where each step pays -1 more; s_x is never left."""
    mdp, _ = make_cliff(3, 0.1)
    assert [int(mdp.P[s, 0].argmax()) for s in range(4)] == [1, 2, 3, 3]
    assert [int(mdp.P[s, 1].argmax()) for s in range(4)] == [3, 3, 3, 3]
    np.testing.assert_array_equal(mdp.r, [[0, -1]] * 3 + [[-1, -2]])
    np.testing.assert_array_equal(mdp.P.sum(-1), 1)


@pytest.mark.parametrize("alpha, expected", [(0, 0.2), (0.5, 4 / 10.5), (0.9, 4 / 2.9), (1, 4)])
def test_gap_of_alpha(alpha, expected):
    """At training error eps the gap is eps T^2/(alpha + (1 - alpha) T): eps T at alpha = 0, below 2 eps T at 0.5, eps T^2 at 1."""
    T, eps = 20, 0.01
    scaled = eps * eps / training_error(*make_cliff(T, eps), alpha)
    mdp, pi = make_cliff(T, scaled)
    assert training_error(mdp, pi, alpha) == pytest.approx(eps, abs=1e-12)
    assert gap(mdp, pi) == pytest.approx(expected, abs=1e-9)
    assert alpha != 0.5 or gap(mdp, pi) < 2 * eps * T


# ---------------------------------------------------------------------------------------------------------------------------------------- Dante


@pytest.mark.parametrize("T, eps, bc_gap", [(5, 0.05, 1.0), (10, 0.02, 1.8), (20, 0.01, 3.8), (50, 0.01, 24.5)])
def test_dante(T, eps, bc_gap):
    """Three rows: up is right and MMDP finds it; closed under negation, the payoff as printed copies the expert; the suffix payoff does not."""
    assert gap(*make_dante(T, eps)) == pytest.approx(bc_gap, abs=1e-9)
    assert gap(*make_dante(T, eps, UP)) == pytest.approx(0, abs=1e-9)
    e = eps * (T - 1)
    expected = {
        ("paper", "{r}"): ([-e, 0, 1 - e], UP),
        ("paper", "{r, -r}"): ([e, 0, abs(1 - e)], STAY),
        ("suffix", "{r}"): ([0, e, 1], UP),
        ("suffix", "{r, -r}"): ([0, e, 1], UP),
    }
    payoffs = dante_payoffs(T, eps)
    assert payoffs.keys() == expected.keys()
    for key, (values, choice) in expected.items():
        np.testing.assert_allclose(payoffs[key], values, atol=1e-9)
        assert np.argmin(payoffs[key]) == choice


def test_dante_step_by_step():
    mdp, pi = make_dante(4, 0.1, DOWN)
    assert mdp.P.argmax(-1).tolist() == [[0, 0, 1], [0, 1, 2], [1, 2, 2]]  # rows clip
    assert mdp.r.tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0]]  # the row *after* the action counts
    assert pi[:, 1].tolist() == [[0, 0, 1], [0, 0.6, 0.4], [0, 1, 0], [0, 1, 0]]


# --------------------------------------------------------------------------------------------------------------------------------- Theorem var

SETTINGS = variance_settings(T=8, T_cliff=10, q=0.2)
EXPECTED_VARIANCES = {
    "independent": (72, 56, 16, 16),
    "deterministic": (408, 280, 16, 128),
    "alternating": (8, 8, 16, 0),  # suffixes beat trajectories: T sigma^2 against 2 T sigma^2
    "cliff": (16, 12.96, 1.6, 16),
}


@pytest.mark.parametrize("setting", EXPECTED_VARIANCES)
def test_variances(setting):
    """Closed forms by value, and each estimator by simulation; all are unbiased but the suffixes as written, which lack a term."""
    assert SETTINGS.keys() == EXPECTED_VARIANCES.keys()
    T, learner, expert, closed_forms = SETTINGS[setting]
    assert closed_forms == pytest.approx(EXPECTED_VARIANCES[setting], abs=1e-9)
    rng = np.random.default_rng(0)
    means = (-2, -1.8, -2, -2) if setting == "cliff" else (0, 0, 0, 0)
    for name, closed_form, mean in zip(ESTIMATORS, closed_forms, means):
        draws = estimate(name, T, learner, expert, 60_000, rng)
        assert draws.var() == pytest.approx(closed_form, rel=0.02, abs=1e-12), name
        assert abs(draws.mean() - mean) < 4 * draws.std() / math.sqrt(len(draws)) + 1e-12, name


# ------------------------------------------------------------------------------------------------------------------------------------- the tree


def test_tree():
    for A, T in ((2, 5), (3, 4)):
        tree = Tree(A, T, seed=1)
        s = 0
        for t, a in enumerate(tree.expert_actions):
            assert tree.expert_states[t] == s
            s = tree.step(s, a)
        assert s == tree.expert_leaf and tree.n_steps == T
        leaves = [0]
        for _ in range(T):
            leaves = [tree.step(s, a) for s in leaves for a in range(A)]
        assert leaves == list(range((A**T - 1) // (A - 1), (A ** (T + 1) - 1) // (A - 1)))
    drawn = np.array([Tree(3, 6, seed).expert_actions for seed in range(60)])
    assert all(set(column) == {0, 1, 2} for column in drawn.T), "the expert's action at each depth must be drawn per seed"


def test_J_is_the_probability_of_the_experts_leaf():
    tree, rng = Tree(2, 3, seed=0), np.random.default_rng(0)
    pi = {s: [p, 1 - p] for s, p in zip(range(7), rng.uniform(size=7))}
    del pi[tree.expert_states[1]]  # uniform there
    leaves = Counter(roll_out(tree, pi, 0, 1, rng) for _ in range(20_000))
    assert tree.n_steps == 60_000  # asking for J costs none
    J = tree.J(pi)
    assert J == pytest.approx(math.prod(pi.get(s, [0.5, 0.5])[a] for s, a in zip(tree.expert_states, tree.expert_actions)))
    assert abs(leaves[tree.expert_leaf] / 20_000 - J) < 4 * math.sqrt(J * (1 - J) / 20_000)
    assert roll_out(tree, pi, 0, 1, rng, t_end=3) in range(3, 7) and tree.n_steps == 60_002


def test_best_response_maximises_L():
    """Against every leaf's L, counted here; ties, leaves that nobody saw included, are broken at random."""
    tree, rng = Tree(2, 3, seed=5), np.random.default_rng(0)
    other = 7 if tree.expert_leaf != 7 else 8
    for reached in ([other] * 4, [other, other, tree.expert_leaf, 9], [tree.expert_leaf] * 3 + [other], [tree.expert_leaf] * 4):
        L = {leaf: (leaf == tree.expert_leaf) - reached.count(leaf) / 4 for leaf in range(7, 15)}
        best = {leaf for leaf in L if L[leaf] == max(L.values())}
        assert {best_response(tree, reached, rng) for _ in range(300)} == best
    assert len(best) == 8


def test_ties_are_broken_at_random():
    rng = np.random.default_rng(0)
    drawn = Counter(random_argmax([0.5, 0.2, 0.5 - 1e-15, 0.4], rng) for _ in range(400))
    assert drawn.keys() == {0, 2} and abs(drawn[0] - 200) < 60


def test_ftrl():
    """pi(.|s) maximises n(s) E[Qbar] + entropy, and only the state of the new sample changes."""
    pi, D = {}, {}
    for a, q in ((0, 1.0), (0, 0.0), (2, 1.0), (2, 1.0)):
        ftrl(pi, D, 5, a, q, A=3)
    weights = np.exp([4 * 0.5, 0, 4 * 1.0])
    np.testing.assert_allclose(pi[5], weights / weights.sum(), atol=1e-12)
    assert list(pi) == [5]

    def objective(p):
        return 4 * (0.5 * p[0] + p[2]) - (p * np.log(p)).sum()

    others = np.random.default_rng(0).dirichlet(np.ones(3), size=2000)
    assert objective(np.array(pi[5])) > max(objective(p) for p in others)
    ftrl(pi, D, 5, 2, 1000.0, A=3)  # does not overflow
    assert pi[5][2] == 1


def test_uniform_irl_takes_T_A_to_the_T():
    """Mean T A^T within 3/sqrt(n), as geometric; without repeats T (A^T + 1)/2, and never more than all leaves."""
    for A, T, n in ((2, 6, 400), (3, 4, 400)):
        runs = [irl(A, T, seed) for seed in range(n)]
        assert abs(np.mean([run.policy_steps for run in runs]) / (T * A**T) - 1) < 3 / math.sqrt(n)
        assert all(run.policy_steps % T == 0 and run.J == 1 and run.reward_steps == 4 * T * run.iterations for run in runs)
        steps = np.array([irl(A, T, seed, repeat=False).policy_steps for seed in range(n)])
        assert abs(steps.mean() / (T * (A**T + 1) / 2) - 1) < 3 / math.sqrt(3 * n)
        assert steps.max() <= T * A**T
    assert [irl(2, 5, seed, "primal") for seed in range(20)] == [irl(2, 5, seed, "dual") for seed in range(20)]  # f_1 is the expert's leaf in both


@pytest.mark.parametrize("A, T, interactions", [(2, 4, 90), (2, 8, 360), (2, 12, 858), (2, 16, 1496), (3, 4, 150), (3, 8, 612), (3, 12, 1404)])
def test_mmdp_interactions_are_exact(A, T, interactions):
    assert mmdp(A, T, 0).policy_steps == interactions == enough(A, T) * T * (T + 1) // 2
    dual = mmdp_dual(A, T, 0)
    assert dual.policy_steps == dual.iterations * enough(A, T) * (T * (T + 1) // 2 - 1)  # t = T needs no roll-out
    assert dual.reward_steps == dual.iterations * 4 * T


@pytest.mark.parametrize("A, T, M, payoff", [(2, 6, 2, "paper"), (2, 6, 3, "suffix"), (3, 4, 3, "paper"), (3, 4, 4, "suffix")])
def test_mmdp_success_probability(A, T, M, payoff):
    """(1 - (1 - 1/A)^(M+1))^T: at each t the expert's action is tried, or the tie is won; |z| < 3."""
    n, p = 400, (1 - (1 - 1 / A) ** (M + 1)) ** T
    successes = [mmdp(A, T, seed, M=M, payoff=payoff).J for seed in range(n)]
    assert set(successes) == {0, 1}
    assert abs(np.mean(successes) - p) < 3 * math.sqrt(p * (1 - p) / n)


def test_mmdp_dual_success_probability():
    """As the primal's, but t = T never fails: (1 - (1 - 1/A)^(M+1))^(T-1) in the first outer iteration."""
    n, p = 400, (1 - 0.5**3) ** 4
    assert abs(np.mean([mmdp_dual(2, 5, seed, M=2).iterations == 1 for seed in range(n)]) - p) < 3 * math.sqrt(p * (1 - p) / n)


@pytest.mark.parametrize("payoff", ["paper", "suffix"])
def test_each_action_once_always_succeeds(payoff):
    for A, T in ((2, 1), (2, 7), (3, 5)):
        for seed in range(40):
            run = mmdp(A, T, seed, payoff=payoff, each_action_once=True)
            assert run.J == 1 and run.policy_steps == A * T * (T + 1) // 2


def test_nrmm_counts():
    """A roll-out from the root takes T interactions, one from s_t T - t + 1; the reward player's 4 a round are apart; a seed decides everything."""
    root = nrmm(2, 4, 0, alpha=0.0)
    assert root.policy_steps == root.iterations * 16 * 4 and root.reward_steps == root.iterations * 4 * 4
    runs = [nrmm(2, 7, seed) for seed in range(20)]
    n_rollouts = 16 * sum(run.iterations for run in runs)
    assert abs(sum(run.policy_steps for run in runs) / n_rollouts - 4) < 4 * 2 / math.sqrt(n_rollouts)  # t uniform on 1..7: mean 4, deviation 2
    assert all(run.J >= 0.5 and run.reward_steps == 4 * 7 * run.iterations for run in runs)
    assert runs == [nrmm(2, 7, seed) for seed in range(20)] and len({run.policy_steps for run in runs}) > 10
    half = [nrmm(2, 7, seed, alpha=0.5) for seed in range(20)]
    n_rollouts = 16 * sum(run.iterations for run in half)
    assert abs(sum(run.policy_steps for run in half) / n_rollouts - 5.5) < 4 * 2.1 / math.sqrt(n_rollouts)


def test_nrmm_dual_counts():
    runs = [(nrmm_dual(2, 6, seed, M=40, judge="policy"), nrmm_dual(2, 6, seed, M=40)) for seed in range(10)]
    assert any(newest.iterations < mixture.iterations for newest, mixture in runs), "a mixture with failures needs more than one success"
    for seed, (newest, mixture) in enumerate(runs):
        assert newest.iterations <= mixture.iterations and newest.J >= 0.5 and mixture.J >= 0.5
        assert newest.reward_steps == newest.iterations * 4 * 6
        n_rollouts = 40 * newest.iterations
        assert abs(newest.policy_steps / n_rollouts - 3.5) < 4 * 1.71 / math.sqrt(n_rollouts)
        enough = nrmm_dual(2, 6, seed)
        assert enough.iterations == 1 and abs(enough.policy_steps / 144 - 3.5) < 4 * 1.71 / 12  # M = 4 T^2


def test_polynomial_against_exponential():
    """A = 2, T = 8, 10 seeds, medians: all that use expert resets stay below the exhaustive search's mean of 2048."""
    cases = ((mmdp, {}), (nrmm, {}), (nrmm, {"adversary": "NR"}), (nrmm, {"alpha": 0.5}))
    mmdp_steps, br_steps, nr_steps, filter_steps = (np.median([run(2, 8, seed, **how).policy_steps for seed in range(10)]) for run, how in cases)
    assert mmdp_steps == 360 and br_steps < 900 and nr_steps < 900 and filter_steps < 1600
    assert br_steps < filter_steps


def test_growth():
    T = [4, 8, 12, 16, 24]
    b, rms, _, worse, _ = growth(T, [t * 3.0**t for t in T])
    assert b == pytest.approx(math.log2(3)) and rms < 1e-9 < worse
    _, worse, c, rms, late = growth(T, [5 * t**2.5 for t in T])
    assert c == pytest.approx(2.5) == late and rms < 1e-9 < worse


# ---------------------------------------------------------------------------------------------------------------------- commands and bad input


@pytest.mark.parametrize("claim, numbers", [
    ("tree", ["MMDP dual", "BC, which needs none here", "20+0", "64", "34", "324"]),
    ("alpha", ["T=4, alpha=0.5", "0.064"]),
    ("cliff", ["0.1", "0.533825"]),
    ("dante", ["-0.18", "stay", "24.5"]),
    ("variance", ["408", "12.96"]),
])  # fmt: skip
def test_claims_print_a_table_and_draw_a_figure(claim, numbers, tmp_path, capsys):
    getattr(tabular, claim)(Args(claim, out=str(tmp_path / "new"), n_seeds=1, horizons={"cliff": (5, 10)}.get(claim, (1, 2, 4))))
    printed = capsys.readouterr().out
    assert [number for number in numbers if number not in printed] == []
    assert [path.name for path in (tmp_path / "new").iterdir()] == [f"{claim}.png"]
    assert (tmp_path / "new" / f"{claim}.png").stat().st_size > 10_000


@pytest.mark.parametrize("make, says", [
    (lambda: Tree(2, 0, 0), "T is 0"),
    (lambda: mmdp(1, 3, 0), "|A| is 1"),
    (lambda: make_cliff(0, 0.1), "T is 0"),
    (lambda: make_cliff(10, 0.2), "eps T is 0.2 * 10 = 2"),
    (lambda: make_cliff(10, -0.1), "eps T is -0.1 * 10"),
    (lambda: make_cliff(1, 2.0, every_step=True), "eps T is 2 * 1"),
    (lambda: make_dante(-1, 0.0), "T is -1"),
    (lambda: make_dante(20, 0.06), "eps T is 0.06 * 20 = 1.2"),
])  # fmt: skip
def test_bad_input_gets_one_sentence(make, says):
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value).startswith(says) and "\n" not in str(error.value) and ": " in str(error.value)


@pytest.mark.parametrize("arguments, says", [
    (["tree", "--horizons", "0"], "T is 0"),
    (["alpha", "--eps", "0.5"], "eps T is 0.5 * 8 = 4"),
    (["alpha", "--eps", "0"], "eps is 0"),
    (["cliff", "--eps", "0.02"], "eps T is 0.02 * 100 = 2"),
])  # fmt: skip
def test_bad_arguments_end_the_command_with_one_sentence(arguments, says, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["tabular.py", *arguments, "--out", str(tmp_path), "--n-seeds", "1"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(ROOT / "algos" / "tabular.py"), run_name="__main__")
    assert str(exit_.value).startswith(says) and list(tmp_path.iterdir()) == []
