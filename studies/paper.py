"""CoBA-RL's tables and figures (2602.03048) from this project's own cells: ``python studies/paper.py --all``

``--table 1`` to ``4``, ``--figure 4`` to ``8``; what has been asked for lands in studies/results/paper as Markdown and
PNG. Trains nothing: reads the finished cells of studies/main.yaml and studies/smollm2.yaml. Our figures stand beside
the paper's, and whether the shape agrees is counted from the cells by one rule (``verdict``).

Table 1 and figures 4, 5 and 7 are numbered as in the paper. The others have the numbers that were left: preferences
(table 2), kappa (3), time of the allocation (4), curves of training (figure 6), other budgets (8).
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from coba_core.integrations.grpo.report import FEWEST_SEEDS, Results, differences, write_text
from coba_core.integrations.grpo.study import load_study

from coba_core.allocators import DIFFICULTY_CLASSES

Floats = npt.NDArray[np.float64]
Place = tuple[str, str]  # pool, batch
Groups = dict[Place, Results]

HERE = Path(__file__).parent
STUDIES = ("main", "smollm2")
METHODS = {"uniform": "GRPO", "knapsack": "Knapsack-RL", "coba": "CoBA-RL"}  # ours: the paper's
PARTS = ("early", "middle", "late")
SOLVED = DIFFICULTY_CLASSES.index("solved")

PAPER_MAIN = {  # averages of five benchmarks, percent: GRPO, Knapsack-RL, CoBA-RL
    "Qwen2.5-7B-Instruct": (42.24, 45.39, 46.78), "Qwen2.5-7B-Base": (43.68, 46.34, 47.43),
    "Qwen3-4B-Base": (44.72, 46.66, 49.46), "Qwen3-1.7B-Base": (31.61, 32.56, 35.75),
}  # fmt: skip
PAPER_PREFERENCES = {
    "coba": 46.78, "linear": 45.39, "fixed_hard": 45.21, "coba_explore_first": 44.50, "fixed_easy": 44.22,
}  # fmt: skip
PAPER_KAPPA = {"coba_k7": (7, 45.40), "coba": (11, 46.61), "coba_k15": (15, 46.24), "coba_k21": (21, 46.56)}
PAPER_BUDGETS = ((7.26, 3.74), (4.50, 6.50), (2.54, 8.46))  # alpha, beta
PAPER_SOLVED = {"medium": (46.8, 50.0, 71.2), "hard": (17.3, 20.4, 36.7)}  # percent: GRPO, Knapsack-RL, CoBA-RL


class Item(NamedTuple):
    """One table or figure: Markdown, what is said of its shape, and a picture where there is one."""

    title: str
    body: str
    says: str
    picture: bytes | None = None

    def text(self, name: str) -> str:
        shown = f"\n![{self.title}]({name}.png)\n" if self.picture else ""
        return f"# {self.title}\n\n{self.body}\n{shown}\n{self.says}\n"


def load(folder: Path = HERE / "results", studies: Iterable[str] = STUDIES) -> Groups:
    """The finished cells by pool and batch, methods in their study's order; ``main`` and ``smollm2`` share no pool."""
    groups: Groups = {}
    for name in studies:
        for cell in load_study(HERE / f"{name}.yaml", folder / name).cells:
            if (result := cell.finished()) is not None:
                place = ("SmolLM2" if name == "smollm2" else cell.pool, cell.batch)
                groups.setdefault(place, {}).setdefault(cell.method, {})[cell.seed] = result
    return groups


def verdict(mean: float, low: float, high: float) -> str:
    """Of a difference that the paper has above 0, with its 95 % interval: agrees, disagrees, or open.

    >>> verdict(0.2, 0.1, 0.3), verdict(-0.2, -0.3, -0.1), verdict(0.1, -0.1, 0.3)
    ('agrees', 'disagrees', 'open')
    >>> verdict(0.2, float("nan"), float("nan"))  # too few seeds for an interval
    'open'
    """
    if low > 0:
        return "agrees"
    return "disagrees" if high < 0 else "open"


def compare(results: Results, better: str, worse: str, measure: str = "final") -> tuple[float, float, float] | None:
    """(mean, low, high) of ``better`` less ``worse``, paired by seed and problem; None without common cells."""
    found = differences({m: results[m] for m in (better, worse) if m in results}, worse, measure).get(better)
    return None if found is None else (found[0], found[1], found[2])


def count(verdicts: Iterable[str]) -> str:
    """How many of each verdict, in words.

    >>> count(["agrees", "open", "agrees"])
    'agrees in 2 of 3, disagrees in 0, open in 1'
    """
    found = Counter(verdicts)
    total = sum(found.values())
    return f"agrees in {found['agrees']} of {total}, disagrees in {found['disagrees']}, open in {found['open']}"


def rows(head: list[str], lines: Iterable[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *lines])


def mean_final(runs: dict[int, dict[str, Any]]) -> str:
    return f"{100 * np.mean([run['final'] for run in runs.values()]):.2f}"


def points(found: tuple[float, float, float] | None) -> str:
    """A difference in percent points with its interval."""
    if found is None:
        return ""
    mean, low, high = (100 * x for x in found)
    return f"{mean:+.2f}" + ("" if np.isnan(low) else f" [{low:+.2f}, {high:+.2f}]")


def name_of(place: Place) -> str:
    return ", ".join(place)


def shared(groups: Groups, methods: Iterable[str], needed: Iterable[str] = ()) -> Groups:
    """Of each place those of ``methods`` that are there, with the seeds that all of them have: what may be compared.

    Places without one of the ``needed`` methods, or without a common seed, are left out.
    """
    found: Groups = {}
    needed = tuple(needed)
    for place, results in groups.items():
        present = {m: results[m] for m in methods if m in results}
        seeds = sorted(set.intersection(*(set(runs) for runs in present.values()))) if present else []
        if seeds and all(m in present for m in needed):
            found[place] = {m: {s: runs[s] for s in seeds} for m, runs in present.items()}
    return found


def seeds_of(results: Results) -> str:
    """Number of seeds of what ``shared`` returned for a place."""
    return str(len(next(iter(results.values()))))


def pairs_table(groups: Groups, pairs: list[tuple[str, str]]) -> tuple[str, str]:
    """Markdown of the differences of each pair (the paper's better one first) by place, and their count in words."""
    verdicts: dict[tuple[str, str], list[str]] = {pair: [] for pair in pairs}
    lines = []
    for place, results in groups.items():
        found = {pair: compare(results, *pair) for pair in pairs}
        if any(value is not None for value in found.values()):
            lines.append([name_of(place), seeds_of(results), *map(points, found.values())])
        for pair, value in found.items():
            if value is not None:
                verdicts[pair].append(verdict(*value))
    body = rows(["pool, batch", "seeds", *(f"{a} − {b}" for a, b in pairs)], lines)
    says = "; ".join(f"{a} above {b}: {count(v)}" for (a, b), v in verdicts.items() if v)
    return body, says


RULE = (
    f"Percent points of held-out avg@16 (SmolLM2: avg@4) at the end, paired by seed and problem, 95 % intervals over "
    f"both from {FEWEST_SEEDS} seeds on. Agrees: the interval lies on the paper's side of 0. Disagrees: on the other."
)


def table_1(groups: Groups) -> Item:
    """Held-out results of even budgets, Knapsack-RL and CoBA-RL."""
    held = shared(groups, METHODS, needed=["uniform", "coba"])
    paper = rows(
        ["the paper: average of five benchmarks", *METHODS.values()],
        ([model, *(f"{x:.2f}" for x in values)] for model, values in PAPER_MAIN.items()),
    )
    ours = rows(
        ["ours: held-out pass rate, %", "seeds", *METHODS],
        (
            [name_of(place), seeds_of(r), *(mean_final(r[m]) if m in r else "" for m in METHODS)]
            for place, r in held.items()
        ),
    )
    pairs, says = pairs_table(held, [("coba", "uniform"), ("knapsack", "uniform"), ("coba", "knapsack")])
    order = "The paper's order is CoBA-RL above Knapsack-RL above GRPO on all four models"
    return Item("Table 1: main results", f"{paper}\n\n{ours}\n\n{RULE}\n\n{pairs}", f"{order}. Ours: {says}.")


def table_2(groups: Groups) -> Item:
    """CoBA's moving preference against fixed, linear and reversed ones."""
    others = [m for m in PAPER_PREFERENCES if m != "coba"]
    held = {place: r for place, r in shared(groups, PAPER_PREFERENCES, needed=["coba"]).items() if len(r) > 1}
    shown = rows(
        ["", "seeds", *PAPER_PREFERENCES],
        [["the paper (`coba`: table 1, Qwen2.5-7B-Instruct)", "", *(f"{x:.2f}" for x in PAPER_PREFERENCES.values())]]
        + [
            [name_of(place), seeds_of(r)] + [mean_final(r[m]) if m in r else "" for m in PAPER_PREFERENCES]
            for place, r in held.items()
        ],
    )
    pairs, says = pairs_table(held, [("coba", m) for m in others] + [("fixed_hard", "fixed_easy")])
    legend = (
        "`coba`: α falls as the policy gets better; `linear`: α from 10 to 1 by the step; `fixed_hard`: (α, β) = "
        "(1.5, 10.5); `coba_explore_first`: α rises; `fixed_easy`: (10.5, 1.5)."
    )
    return Item("Table 2: preferences", f"{legend}\n\n{shown}\n\n{RULE}\n\n{pairs}", f"Ours: {says}.")


def table_3(groups: Groups) -> Item:
    """kappa = 7, 11, 15, 21."""
    varied = {place: r for place, r in groups.items() if any(m in r for m in PAPER_KAPPA if m != "coba")}
    held = shared(varied, (*PAPER_KAPPA, "uniform"), needed=["coba"])
    shown = rows(
        ["", "seeds", *(f"κ = {k}" for k, _ in PAPER_KAPPA.values()), "uniform"],
        [["the paper", "", *(f"{x:.2f}" for _, x in PAPER_KAPPA.values()), ""]]
        + [
            [name_of(place), seeds_of(r)] + [mean_final(r[m]) if m in r else "" for m in (*PAPER_KAPPA, "uniform")]
            for place, r in held.items()
        ],
    )
    pairs, says = pairs_table(held, [("coba", m) for m in PAPER_KAPPA if m != "coba"] + [("coba", "uniform")])
    if not held:
        return Item("Table 3: κ", "No cell varies κ yet.", "")
    spreads = []
    for place, r in held.items():
        finals = {m: float(mean_final(r[m])) for m in PAPER_KAPPA if m in r}
        best = max(finals, key=lambda m: finals[m])
        spread = max(finals.values()) - min(finals.values())
        spreads.append(f"{name_of(place)}: best κ = {PAPER_KAPPA[best][0]}, largest less smallest {spread:.2f} points")
    values = [x for _, x in PAPER_KAPPA.values()]
    theirs = f"The paper: best κ = 11, largest less smallest {max(values) - min(values):.2f} points"
    return Item("Table 3: κ", f"{shown}\n\n{RULE}\n\n{pairs}", f"{theirs}. Ours: {'; '.join(spreads)}. {says}.")


def table_4(groups: Groups) -> Item:
    """What an allocation costs beside a step."""
    lines = []
    shares = []
    for place, r in groups.items():
        for method in METHODS:
            if method not in r:
                continue
            runs = list(r[method].values())
            step = np.mean([1e3 * run["seconds_in_steps"] / run["steps"] for run in runs])
            cost = float(np.mean([run["allocator_ms_per_step"] for run in runs]))
            prompts = runs[0]["config"].get("prompts_per_step", 64)  # a cell keeps what differs from the default
            lines.append([name_of(place), str(prompts), method, f"{cost:.2f}", f"{step:.0f}", f"{cost / step:.2%}"])
            shares.append(cost / step)
    body = rows(["pool, batch", "prompts", "method", "allocator, ms a step", "step, ms", "share"], lines)
    theirs = "The paper: 512 prompts, 8192 rollouts: DP 115.05 s, heap 0.124 s (928 times faster)."
    says = (
        "No cell holds the time of a dynamic programme; the benches do (docs/performance.md). From cells, which ran on "
        f"busy cores: budgets and bookkeeping take at most {max(shares):.2%} of a step of these small policies."
        if shares
        else "No cell yet."
    )
    return Item("Table 4: time of the allocation", f"{theirs}\n\n{body}", says)


def by_rate(runs: Iterable[dict[str, Any]], part: str) -> Floats:
    """[mean estimate, mean budget, prompts] of each tenth of the estimated pass rate with 20 prompts on, ``[n, 3]``."""
    found = np.array([point for run in runs for point in run["budget_by_rate"].get(part, [])], dtype=np.float64)
    if not len(found):
        return np.empty((0, 3))
    place = np.minimum((found[:, 0] * 10).astype(int), 9)
    weight = np.bincount(place, found[:, 2], 10)
    kept = weight >= 20
    sums = [np.bincount(place, found[:, i] * found[:, 2], 10)[kept] / weight[kept] for i in (0, 1)]
    return np.stack([*sums, weight[kept]], axis=1)


def curve_mean(runs: Iterable[dict[str, Any]], name: str, part: str) -> float:
    """Mean of a curve of the steps over a third of the run, over runs; NaN where nothing is known."""
    low = PARTS.index(part) / 3
    values = []
    for run in runs:
        for share, y in zip(run["curves"]["share"], run["curves"].get(name, []), strict=False):
            if y is not None and low <= share < low + 1 / 3 + 1e-9:
                values.append(y)
    return float(np.mean(values)) if values else float("nan")


def beta_mode(alpha: float, beta: float) -> float:
    """Where a Beta density is largest.

    >>> round(beta_mode(7.26, 3.74), 3), beta_mode(1.0, 5.0), beta_mode(5.0, 1.0)
    (0.696, 0.0, 1.0)
    """
    if alpha <= 1 and beta > 1:
        return 0.0
    if beta <= 1:
        return 1.0
    return (alpha - 1) / (alpha + beta - 2)


def preferred_rate(runs: Iterable[dict[str, Any]], part: str) -> float:
    """Mean estimated pass rate of a rollout above the smallest mean budget: where the spare budget went; or NaN."""
    found = by_rate(runs, part)
    if not len(found):
        return float("nan")
    spare = (found[:, 1] - found[:, 1].min()) * found[:, 2]
    return float(spare @ found[:, 0] / spare.sum()) if spare.sum() > 0 else float("nan")


def panels(number: int) -> tuple[Any, list[Any]]:
    """A figure with a panel for each place."""
    from matplotlib.figure import Figure

    wide = min(3, max(1, number))
    tall = -(-max(1, number) // wide)
    figure = Figure(figsize=(5 * wide, 3.6 * tall), layout="constrained")
    axes = figure.subplots(tall, wide, squeeze=False).ravel().tolist()
    for spare in axes[number:]:
        spare.set_axis_off()
    return figure, axes[:number]


def png(figure: Any) -> bytes:
    import io

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=80, metadata={"Software": None})
    return buffer.getvalue()


def figure_4(groups: Groups) -> Item:
    """CoBA's budgets over the estimated pass rate, early, middle and late in training."""
    held = {place: list(r["coba"].values()) for place, r in groups.items() if "coba" in r}
    figure, axes = panels(len(held))
    lines = [
        ["the paper", "", *(f"({a:g}, {b:g})" for a, b in PAPER_BUDGETS)]
        + [f"{beta_mode(*ab):.2f}" for ab in PAPER_BUDGETS]
        + ["", ""]
    ]
    falls = []
    for axis, (place, runs) in zip(axes, held.items(), strict=True):
        alphas = [(curve_mean(runs, "alpha", part), curve_mean(runs, "beta", part)) for part in PARTS]
        for part, (a, b) in zip(PARTS, alphas, strict=True):
            found = by_rate(runs, part)
            axis.plot(found[:, 0], found[:, 1], marker="o", markersize=3, label=f"{part}: α {a:.2f}, β {b:.2f}")
        axis.set(xlabel="estimated pass rate", ylabel="mean budget", title=name_of(place), xlim=(0, 1))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
        went = [preferred_rate(runs, part) for part in PARTS]
        lines.append(
            [name_of(place), str(len(runs)), *(f"({a:.2f}, {b:.2f})" for a, b in alphas)]
            + [f"{beta_mode(a, b):.2f}" for a, b in alphas]
            + [f"{went[0]:.2f}", f"{went[2]:.2f}"]
        )
        falls.append(beta_mode(*alphas[2]) < beta_mode(*alphas[0]))
    head = ["pool, batch", "seeds", *(f"(α, β) {part}" for part in PARTS), *(f"mode {part}" for part in PARTS)]
    body = rows([*head, "spare budget at, early", "late"], lines)
    body += "\n\nMode: the pass rate at which the Beta density is largest. Spare: above the smallest mean budget."
    ends = [beta_mode(*PAPER_BUDGETS[i]) for i in (0, 2)]
    says = (
        f"The paper's mode falls from {ends[0]:.2f} to {ends[1]:.2f}. Ours falls between the first and the last third "
        f"in {sum(falls)} of {len(falls)} places."
    )
    return Item("Figure 4: budgets over the pass rate", body, says, png(figure) if held else None)


def known(run: dict[str, Any], name: str) -> tuple[list[float], list[float]]:
    """Share of the rollouts and value, where the curve is known."""
    found = [(x, y) for x, y in zip(run["curves"]["share"], run["curves"].get(name, []), strict=False) if y is not None]
    return [x for x, _ in found], [y for _, y in found]


def figure_5(groups: Groups) -> Item:
    """alpha over training."""
    methods = ("coba", "coba_explore_first", "linear")
    held = {place: r for place, r in groups.items() if "coba" in r}
    figure, axes = panels(len(held))
    lines, falls = [["the paper (as drawn)", "", "8", "3"]], []
    for axis, (place, r) in zip(axes, held.items(), strict=True):
        for method in methods:
            curves = [known(run, "alpha") for run in r.get(method, {}).values()]
            if curves and curves[0][1]:
                share = np.linspace(max(c[0][0] for c in curves), min(c[0][-1] for c in curves), 40)
                axis.plot(share, np.mean([np.interp(share, *c) for c in curves], axis=0), label=method)
        axis.set(xlabel="share of the rollouts", ylabel="α", title=name_of(place))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
        ends = [(known(run, "alpha")[1][0], known(run, "alpha")[1][-1]) for run in r["coba"].values()]
        first, last = np.mean(ends, axis=0)
        lines.append([name_of(place), str(len(ends)), f"{first:.2f}", f"{last:.2f}"])
        falls.append(last < first)
    says = f"The paper's α falls from 8 to 3. Ours ends lower than it starts in {sum(falls)} of {len(falls)} places."
    body = rows(["CoBA's α", "seeds", "start", "end"], lines)
    return Item("Figure 5: α over training", body, says, png(figure) if held else None)


def held_out_curve(runs: Iterable[dict[str, Any]], at: Floats) -> Floats:
    """Held-out pass rate at shares ``[T]`` of the rollouts, by straight lines between evaluations, mean over runs."""
    curves = []
    for run in runs:
        spent = np.array([e["rollouts"] for e in run["evaluations"]]) / run["rollouts"]
        curves.append(np.interp(at, spent, [e[f"avg@{run['samples']}"] for e in run["evaluations"]]))
    return np.asarray(np.mean(curves, axis=0))


def figure_6(groups: Groups) -> Item:
    """Held-out pass rate over training."""
    held = shared(groups, METHODS, needed=METHODS)
    figure, axes = panels(len(held))
    at = np.linspace(0, 1, 9)
    lines, ahead = [], []
    for axis, (place, r) in zip(axes, held.items(), strict=True):
        curves = {m: held_out_curve(r[m].values(), at) for m in METHODS}
        for method, curve in curves.items():
            axis.plot(at, curve, label=method)
        axis.set(xlabel="share of the rollouts", ylabel="held-out pass rate", title=name_of(place))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
        lead = [int((curves[m][1:] > curves["uniform"][1:]).sum()) for m in ("knapsack", "coba")]
        ahead.append(lead)
        lines.append([name_of(place), seeds_of(r), *(f"{n} of {len(at) - 1}" for n in lead)])
        lines[-1] += [points(compare(r, m, "uniform", "area")) for m in ("knapsack", "coba")]
    head = ["pool, batch", "seeds", "evaluations with knapsack above uniform", "with coba above uniform"]
    body = rows([*head, "area: knapsack − uniform, points", "coba − uniform"], lines)
    total = len(ahead) * (len(at) - 1)
    says = (
        f"Over all places Knapsack-RL is above even budgets at {sum(a for a, _ in ahead)} of {total} evaluations, "
        f"CoBA-RL at {sum(b for _, b in ahead)}. Of the paper's curves there are no numbers to compare with."
    )
    return Item("Figure 6: held-out pass rate over training", body, says, png(figure) if held else None)


def share_solved(table: npt.ArrayLike, name: str, *, least: int = SOLVED) -> float:
    """Of the problems that began in class ``name``, the share that ends in class ``least`` or above; NaN of none.

    >>> table = np.zeros((5, 5)); table[2, 2:] = 1, 1, 2
    >>> share_solved(table, "medium"), share_solved(table, "medium", least=3)
    (0.5, 0.75)
    """
    row = np.asarray(table, dtype=np.float64)[DIFFICULTY_CLASSES.index(name)]
    return float(row[least:].sum() / row.sum()) if row.sum() else float("nan")


def transition_order(results: Results, better: str, worse: str, name: str) -> str:
    """Of the share of ``name`` problems that end easy or solved: agrees if ``better`` is ahead with every seed."""
    gaps = [
        share_solved(results[better][s]["transitions"], name, least=SOLVED - 1)
        - share_solved(results[worse][s]["transitions"], name, least=SOLVED - 1)
        for s in sorted(set(results.get(better, {})) & set(results.get(worse, {})))
    ]
    if len(gaps) < FEWEST_SEEDS or not np.isfinite(gaps).all():
        return "open"
    return "agrees" if min(gaps) > 0 else "disagrees" if max(gaps) < 0 else "open"


def figure_7(groups: Groups) -> Item:
    """Training problems from class to class."""
    held = shared(groups, METHODS, needed=METHODS)
    figure, axes = panels(3 * len(held))
    lines = [
        ["the paper", "", name, "solved", *(f"{x:.1f}" for x in PAPER_SOLVED[name])] for name in ("medium", "hard")
    ]
    verdicts = []
    for i, (place, r) in enumerate(held.items()):
        tables = {m: np.sum([run["transitions"] for run in r[m].values()], axis=0) for m in METHODS}
        for axis, (method, table) in zip(axes[3 * i : 3 * i + 3], tables.items(), strict=True):
            share = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
            axis.imshow(share, vmin=0, vmax=1, cmap="Blues")
            for y, x in np.ndindex(*share.shape):
                shade = "white" if share[y, x] > 0.6 else "black"
                axis.text(x, y, f"{share[y, x]:.2f}", ha="center", va="center", fontsize=7, color=shade)
            axis.set(title=f"{name_of(place)}: {method}", xticks=range(5), yticks=range(5), xlabel="after")
            axis.set_xticklabels(DIFFICULTY_CLASSES, fontsize=7)
            axis.set_yticklabels(DIFFICULTY_CLASSES, fontsize=7)
        for name in ("medium", "hard"):
            for least, end in ((SOLVED, "solved"), (SOLVED - 1, "easy or solved")):
                shares = [100 * share_solved(table, name, least=least) for table in tables.values()]
                number = int(tables["uniform"][DIFFICULTY_CLASSES.index(name)].sum())
                lines.append([name_of(place), f"{seeds_of(r)}; {number}", name, end])
                lines[-1] += ["" if np.isnan(x) else f"{x:.1f}" for x in shares]
            verdicts.append(transition_order(r, "coba", "uniform", name))
    head = ["pool, batch", "seeds; problems", "began", "ends", *(f"{m}, %" for m in METHODS)]
    note = "Solved: right in each of the samples (16; SmolLM2: 4), so that one slip keeps a problem out of it."
    body = f"{rows(head, lines)}\n\n{note}"
    says = (
        "In the paper CoBA-RL takes the largest share of medium and of hard prompts to solved. Ours, CoBA-RL above "
        "even budgets in the share that ends easy or solved, medium and hard of each place, with each of at least "
        f"{FEWEST_SEEDS} seeds: {count(verdicts)}."
    )
    return Item("Figure 7: from class to class", body, says, png(figure) if held else None)


def figure_8(groups: Groups) -> Item:
    """Results at half, once and twice the rollouts."""
    methods = ("uniform_half", "uniform", "uniform_double", "coba_half", "coba", "knapsack")
    held = shared(groups, methods, needed=["uniform", "uniform_double"])
    present = [m for m in methods if any(m in r for r in held.values())]
    figure, axes = panels(len(held))
    lines = []
    saved: dict[str, list[str]] = {"coba": [], "knapsack": []}
    for axis, (place, r) in zip(axes, held.items(), strict=True):
        for method in present:
            if method in r:
                runs = list(r[method].values())
                axis.plot(runs[0]["rollouts"], 100 * np.mean([run["final"] for run in runs]), "o", label=method)
        axis.set(xlabel="rollouts", ylabel="held-out pass rate at the end, %", title=name_of(place))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
        lines.append([name_of(place), seeds_of(r), *(mean_final(r[m]) if m in r else "" for m in present)])
        for method, found in saved.items():
            if method in r:
                less = [run["final"] - r["uniform_double"][s]["final"] for s, run in r[method].items()]
                found.append("agrees" if min(less) > 0 else "disagrees" if max(less) < 0 else "open")
    theirs = "The paper: CoBA-RL with 2048 rollouts a step 45.52, GRPO with 4096 42.78."
    half = "" if "coba_half" in present else " No cell runs CoBA-RL at half the rollouts; its nearest analogue is:"
    parts = [f"{m} above uniform at twice its rollouts, with each seed: {count(v)}" for m, v in saved.items() if v]
    body = f"{theirs}\n\n{rows(['pool, batch', 'seeds', *present], lines)}"
    says = f"In the paper CoBA-RL beats even budgets of twice the rollouts.{half} {'; '.join(parts)}."
    return Item("Figure 8: results at other budgets", body, says, png(figure) if held else None)


ITEMS: dict[str, Callable[[Groups], Item]] = {
    "table-1": table_1, "table-2": table_2, "table-3": table_3, "table-4": table_4, "figure-4": figure_4,
    "figure-5": figure_5, "figure-6": figure_6, "figure-7": figure_7, "figure-8": figure_8,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", type=int, action="append", default=[], choices=(1, 2, 3, 4))
    parser.add_argument("--figure", type=int, action="append", default=[], choices=(4, 5, 6, 7, 8))
    parser.add_argument("--all", action="store_true", help="all tables and figures, and summary.md")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where main/ and smollm2/ are")
    parser.add_argument("--output", type=Path, default=None, help="default: paper/ in the results")
    options = parser.parse_args(arguments)
    names = [f"table-{n}" for n in options.table] + [f"figure-{n}" for n in options.figure]
    if options.all:
        names = list(ITEMS)
    if not names:
        parser.error("give --table, --figure or --all")
    try:
        groups = load(options.results)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if not groups:
        print(f"{options.results}: no finished cell of {' or '.join(STUDIES)}", file=sys.stderr)
        return 1
    output = options.output or options.results / "paper"
    output.mkdir(parents=True, exist_ok=True)
    cells = sum(len(runs) for r in groups.values() for runs in r.values())
    summary = [f"# CoBA-RL's tables and figures, from {cells} cells\n\n`python studies/paper.py --all`\n"]
    for name in names:
        item = ITEMS[name](groups)
        if item.picture:
            partial = output / f".{name}.png.partial"
            partial.write_bytes(item.picture)
            partial.replace(output / f"{name}.png")
        write_text(output / f"{name}.md", item.text(name))
        print(item.text(name))
        summary.append(f"- [{item.title}]({name}.md): {item.says}\n")
    if options.all:
        write_text(output / "summary.md", "\n".join((summary[0], "".join(summary[1:]))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
