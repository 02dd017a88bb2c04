"""A study in the credit lab: the best hyper-parameters of each scheme under an equal budget, then fresh seeds."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from jaxtyping import Array, Float

from agentr1_jax.credit import get_scheme
from agentr1_jax.report.statistics import holm, probability_of_improvement
from experiments.lab.processes import Process, Tables, capacity, tabulate
from experiments.lab.training import Curves, PolicyKind, Setting, action_values, make_trainer

RATES = {"tabular": (0.03, 1.5), "recurrent": (0.003, 0.15)}
"""Lowest and highest learning rate."""
OWN: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "token_gae": ("lam", (0.9, 1.0)),
    "step_gae": ("lam", (0.9, 1.0)),
    "bilevel_gae": ("lam", (0.9, 1.0)),
    "reinforce": ("gamma", (0.9, 1.0)),
    "reinforce_pp": ("gamma", (0.9, 1.0)),
    "turn_grpo": ("outcome_weight", (0.3, 1.0)),
    "gigpo": ("gamma", (0.9, 1.0)),
    "hgpo": ("gamma", (0.9, 1.0)),
    "state_baseline": ("gamma", (0.9, 1.0)),
    "rtmc": ("gamma", (0.9, 1.0)),
    "ecpo": ("gamma", (0.9, 1.0)),
    "graph_gpo": ("omega", (0.1, 0.5)),
    "igpo": ("gamma", (0.9, 1.0)),
    "a2tgpo": ("gamma", (0.9, 1.0)),
}
"""The hyper-parameter of a scheme that is chosen beside the learning rate, and its values."""
FIXED = {"trace": (("frozen", False),)}
"""Arguments of schemes in the lab, where the reference is the uniform policy and believes nothing."""
CHUNK, JOBS = 25, 4
"""Seeds of a job, and jobs of a call: fixed, so that choosing and reporting run one program."""
OPTIMUM = 0.9
"""Share of what can be gained that counts as reached."""


class Plan(NamedTuple):
    """Size of a study.

    Attributes:
      seeds: trainings that are reported of each scheme and process.
      tuning_seeds: trainings of each candidate; other seeds than those reported.
      budget: candidates of each scheme, all of the same number.
      updates, groups, samples: of a training.
      policy: kind of policy.
      seed: of all seeds.
    """

    seeds: int = 100
    tuning_seeds: int = 25
    budget: int = 8
    updates: int = 200
    groups: int = 2
    samples: int = 8
    policy: PolicyKind = "tabular"
    seed: int = 0


class Candidate(NamedTuple):
    """Hyper-parameters of a scheme: the learning rate of the policy, and arguments."""

    rate: float
    arguments: Mapping[str, float]

    @property
    def label(self) -> str:
        """As tables show it."""
        return ", ".join([f"lr {self.rate:.2g}", *(f"{key} {x:g}" for key, x in self.arguments.items())])


@dataclasses.dataclass(frozen=True)
class Result:
    """Trainings of one scheme on one process.

    Attributes:
      scheme, process: their names.
      choice: the best candidate on the tuning seeds.
      share: of what can be gained over the uniform policy, (J − J₀) / (J* − J₀), before each update.
      alignment, alignment_best: mean rank correlation of advantages with A^π and with Q* − V*; NaN where there is none.
    """

    scheme: str
    process: str
    choice: Candidate
    share: Float[np.ndarray, "seeds updates"]
    alignment: float
    alignment_best: float

    @property
    def area(self) -> Float[np.ndarray, "seeds"]:
        """Mean share over the updates: area under the learning curve."""
        return self.share.mean(-1)

    @property
    def updates_to_optimum(self) -> Float[np.ndarray, "seeds"]:
        """Updates until the share is at least `OPTIMUM`; infinite where it never is."""
        there = self.share >= OPTIMUM
        return np.where(there.any(-1), there.argmax(-1), np.inf)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two schemes on one process, by the area under their curves.

    Attributes:
      process, one, other: names.
      improvement: probability that a training of `one` is better than one of `other`, ties a half.
      p: of the Mann–Whitney test, by Holm's correction over all pairs of the process.
    """

    process: str
    one: str
    other: str
    improvement: float
    p: float


def candidates(scheme: str, plan: Plan) -> list[Candidate]:
    """Return the candidates of a scheme: learning rates, evenly in their logarithm, times the values of its own."""
    name, values = OWN.get(scheme, ("", ()))
    values = values if scheme in OWN and name in get_scheme(scheme).defaults else ()
    own: list[Mapping[str, float]] = [{name: x} for x in values] or [{}]
    rates = np.geomspace(*RATES[plan.policy], max(plan.budget // len(own), 1) + 2)[1:-1]
    return [Candidate(float(rate), arguments) for arguments, rate in itertools.product(own, rates)]


def run(setting: Setting, tables: Tables, wanted: Sequence[tuple[Candidate, Float[np.ndarray, "seeds key"]]]) -> Curves:
    """Train each candidate with its seeds, equally many; leaves [candidates, seeds, updates]."""
    seeds = len(wanted[0][1])
    jobs = [(c, keys[i : i + CHUNK]) for c, keys in wanted for i in range(0, seeds, CHUNK)]
    parts = []
    for i in range(0, len(jobs), JOBS):
        # The last call and the last chunk are filled up with repetitions.
        four = (jobs[i : i + JOBS] * JOBS)[:JOBS]
        keys = jnp.stack([jnp.resize(keys, (CHUNK, *keys.shape[1:])) for _, keys in four])
        rates = jnp.array([c.rate for c, _ in four])
        arguments = {key: jnp.array([c.arguments[key] for c, _ in four]) for key in four[0][0].arguments}
        curves = make_trainer(setting)(tables, rates, arguments, keys)
        parts.append(jax.tree.map(np.asarray, curves))
    whole = jax.tree.map(lambda *x: np.concatenate(x)[: len(jobs)], *parts)
    return jax.tree.map(lambda x: x.reshape(len(wanted), -1, x.shape[-1])[:, :seeds], whole)


def keys_of(plan: Plan, purpose: str) -> Float[np.ndarray, "seeds key"]:
    """Return the keys of the seeds for `tuning` or for the `report`; no two are equal."""
    first, count = (0, plan.seeds) if purpose == "report" else (1_000_000, plan.tuning_seeds)
    base = jax.random.PRNGKey(plan.seed)
    return np.asarray(jax.vmap(lambda i: jax.random.fold_in(base, i))(first + jnp.arange(count)))


def study(
    names: Sequence[str], processes: Mapping[str, Process], plan: Plan, show: Callable[[Result], None]
) -> list[Result]:
    """Choose hyper-parameters of each scheme on each process, then train fresh seeds.

    A scheme that needs a belief is left out where a process asks nothing. `show` is called with every result.
    """

    def of_scheme(name: str, steps: int) -> list[Result]:
        setting = Setting(name, FIXED.get(name, ()), plan.policy, steps, plan.groups, plan.samples, plan.updates)
        out = []
        for process_name, process in processes.items():
            if capacity(process) != steps or (setting.scheme.needs_belief and process.gold is None):
                continue
            out.append(of_process(setting, process_name, process, plan))
            show(out[-1])
        return out

    jobs = list(itertools.product(names, dict.fromkeys(map(capacity, processes.values()))))
    # A program uses one core: two at a time.
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = itertools.chain.from_iterable(pool.map(lambda job: of_scheme(*job), jobs))
        found = {(r.scheme, r.process): r for r in results}
    return [found[key] for key in itertools.product(names, processes) if key in found]


def of_process(setting: Setting, name: str, process: Process, plan: Plan) -> Result:
    """Choose the hyper-parameters of one scheme on one process by the area under the curve, then train fresh seeds."""
    tables = jax.tree.map(jnp.asarray, tabulate(process))
    first, best = map(float, bounds(tables, setting.horizon))
    tried, tuning = candidates(setting.name, plan), keys_of(plan, "tuning")
    areas = run(setting, tables, [(candidate, tuning) for candidate in tried]).expected.mean((-2, -1))
    choice = tried[int(np.argmax(areas))]
    curves = jax.tree.map(lambda x: x[0], run(setting, tables, [(choice, keys_of(plan, "report"))]))
    return Result(
        scheme=setting.name,
        process=name,
        choice=choice,
        share=(curves.expected - first) / (best - first),
        alignment=_mean(curves.alignment),
        alignment_best=_mean(curves.alignment_best),
    )


@functools.partial(jax.jit, static_argnums=1)
def bounds(tables: Tables, horizon: int) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return J of the uniform policy and of the best one that sees states."""
    uniform = tables.allowed / jnp.sum(tables.allowed, 1, keepdims=True)
    first, best = (action_values(tables, horizon, policy)[1][0, tables.start].mean() for policy in (uniform, None))
    return first, best


def _mean(x: np.ndarray) -> float:
    return float(x[np.isfinite(x)].mean()) if np.isfinite(x).any() else float("nan")


def compare(results: Sequence[Result]) -> list[Pair]:
    """Return every pair of schemes on every process, by area under the curve."""
    pairs = []
    for process in dict.fromkeys(r.process for r in results):
        of_process = [r for r in results if r.process == process]
        both = list(itertools.combinations(of_process, 2))
        if not both:
            continue
        tests = scipy.stats.mannwhitneyu(*(np.stack([pair[i].area for pair in both]) for i in (0, 1)), axis=-1)
        improvement = probability_of_improvement(*(np.stack([pair[i].area for pair in both]) for i in (0, 1)))
        corrected = holm(np.nan_to_num(tests.pvalue, nan=1.0))
        pairs += [
            Pair(process, one.scheme, other.scheme, float(x), float(p))
            for (one, other), x, p in zip(both, np.atleast_1d(improvement), corrected, strict=True)
        ]
    return pairs


def visible_difference(results: Sequence[Result], level: float = 0.05, power: float = 0.8) -> float:
    """Return the smallest difference of two mean areas on a process that its tests find with this power.

    (z_{1 − α/2m} + z_power)·s·√(2/n) for normal scores: n seeds, s the largest standard deviation of any scheme, and m
    pairs, by all of which Holm's first step divides the level.
    """
    m = max(len(results) * (len(results) - 1) // 2, 1)
    n = len(results[0].area)
    z = scipy.stats.norm.ppf(1 - level / (2 * m)) + scipy.stats.norm.ppf(power)
    return float(z * max(r.area.std(ddof=1) for r in results) * (2 / n) ** 0.5)


def false_positives(name: str, process: Process, plan: Plan, *, repetitions: int, seeds: int) -> float:
    """Return how often a scheme differs from itself at level .05, in repetitions with fresh seeds for both sides."""
    setting = Setting(
        name, FIXED.get(name, ()), plan.policy, capacity(process), plan.groups, plan.samples, plan.updates
    )
    tables = jax.tree.map(jnp.asarray, tabulate(process))
    candidate = candidates(name, plan)[-1]
    keys = keys_of(plan._replace(seeds=2 * repetitions * seeds), "report")
    area = run(setting, tables, [(candidate, keys)]).expected[0].mean(-1).reshape(2, repetitions, seeds)
    return float(np.mean(scipy.stats.mannwhitneyu(area[0], area[1], axis=-1).pvalue < 0.05))
