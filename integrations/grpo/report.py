"""What a study's finished cells say: Markdown tables, an HTML page that needs no network, one JSONL of everything."""

from __future__ import annotations

import base64
import html
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coba_core.allocators import DIFFICULTY_CLASSES

from .study import Study

Floats = npt.NDArray[np.float64]
Results = dict[str, dict[int, dict[str, Any]]]  # method -> seed -> result
RESAMPLES = 4000
FEWEST_SEEDS = 3  # for an interval: of two seeds nobody knows how they vary


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def paired_bootstrap(difference: npt.ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0) -> tuple[float, ...]:
    """Mean of paired differences [seeds, problems], its 95 % percentile interval, and a two-sided p-value.

    Seeds and problems are both drawn with return, so that the interval speaks of other seeds and other problems of the
    kind. p = 2 min(share of means <= 0, share >= 0), counting the sample itself as one of them.

    >>> mean, low, high, p = paired_bootstrap(np.full((3, 4), 0.25))
    >>> mean, low, high, p < 0.001
    (0.25, 0.25, 0.25, True)
    """
    d = np.asarray(difference, dtype=np.float64)
    if d.ndim != 2 or not d.size:
        raise ValueError(f"difference has shape {d.shape}, not [seeds, problems] with at least one of each")
    rng = np.random.default_rng(seed)
    seeds, problems = d.shape
    by_seed = rng.multinomial(seeds, np.full(seeds, 1 / seeds), resamples) / seeds
    by_problem = rng.multinomial(problems, np.full(problems, 1 / problems), resamples) / problems
    means = np.einsum("rp,rp->r", by_seed @ d, by_problem)
    low, high = np.quantile(means, [0.025, 0.975])
    tail = min(int((means <= 0).sum()), int((means >= 0).sum()))
    return float(d.mean()), float(low), float(high), min(1.0, 2 * (tail + 1) / (resamples + 1))


def holm(p_values: dict[str, float]) -> dict[str, float]:
    """Holm's step-down correction: the chance of any false finding among all stays below the level.

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    corrected: dict[str, float] = {}
    largest = 0.0
    for i, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (len(p_values) - i) * p))
        corrected[name] = largest
    return corrected


def differences(results: Results, reference: str, measure: str) -> dict[str, tuple[float, ...]]:
    """By method that spends as much as the reference: (mean, low, high, Holm-corrected p, seeds) of the difference.

    measure: "final" (the last held-out pass rate) or "area" (its mean over the rollouts). Paired by seed and problem.
    Low, high and p are NaN below FEWEST_SEEDS common seeds.
    """
    found: dict[str, tuple[float, ...]] = {}
    raw: dict[str, float] = {}
    base = results.get(reference, {})
    for method, runs in results.items():
        common = sorted(set(runs) & set(base))
        if method == reference or not common or not _same_spend(runs[common[0]], base[common[0]]):
            continue
        gap = np.array([_by_problem(runs[s], measure) - _by_problem(base[s], measure) for s in common])
        mean, low, high, p = paired_bootstrap(gap)
        if len(common) < FEWEST_SEEDS:
            low = high = p = float("nan")
        else:
            raw[method] = p
        found[method] = (mean, low, high, p, len(common))
    corrected = holm(raw)
    return {m: (*values[:3], corrected.get(m, float("nan")), values[4]) for m, values in found.items()}


def _same_spend(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(abs(one["rollouts"] - other["rollouts"]) <= 0.02 * other["rollouts"])


def _by_problem(result: dict[str, Any], measure: str) -> Floats:
    if measure == "area":
        return np.array(result["area_by_problem"])
    return np.array(result["correct"]) / float(result["samples"])


def _interval(value: tuple[float, ...]) -> str:
    mean, low, high = value[:3]
    return f"{mean:+.3f}" + ("" if np.isnan(low) else f" [{low:+.3f}, {high:+.3f}]")


def _mean(runs: dict[int, dict[str, Any]], key: str, digits: int = 3) -> str:
    return f"{np.mean([run[key] for run in runs.values()]):.{digits}f}"


def table(results: Results, reference: str) -> str:
    """Markdown: one line a method, means over its seeds; differences over the seeds it shares with the reference."""
    final, over = differences(results, reference, "final"), differences(results, reference, "area")
    sample = next(iter(next(iter(results.values())).values()))
    average, most = f"avg@{sample['samples']}", f"pass@{2 ** (sample['samples'].bit_length() - 1)}"
    base = list(results.get(reference, {}).values())
    reached = [t for t in sample["reached"] if base and all(run["reached"][t] is not None for run in base)]
    target = max(reached, key=float, default=None)
    head = [
        "method", "seeds", average, most, f"{average} − {reference}", "p (Holm)", "area", f"area − {reference}",
        *([f"rollouts to {target}"] if target else []), "mixed", "gradient rows", "Gini", "estimate error", "entropy",
        "length", "allocator ms",
    ]  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for method, runs in results.items():
        last = [run["evaluations"][-1] for run in runs.values()]
        errors = [run["estimate_errors"][-1]["mean_absolute"] for run in runs.values()]
        reach = [run["reached"].get(target) for run in runs.values()] if target else []
        shown = f"{np.mean([r for r in reach if r]):.0f}" if reach and all(reach) else f"{sum(map(bool, reach))} reach"
        p = final[method][3] if method in final else float("nan")
        row = [
            method, str(len(runs)), _mean(runs, "final"), f"{np.mean([e[most] for e in last]):.3f}",
            _interval(final[method]) if method in final else "", "" if np.isnan(p) else f"{p:.3f}",
            _mean(runs, "area"), _interval(over[method]) if method in over else "", *([shown] if target else []),
            _mean(runs, "mixed_groups"), _mean(runs, "rows_with_gradient"), _mean(runs, "gini"),
            f"{np.mean(errors):.3f}", _mean(runs, "entropy"), _mean(runs, "length", 2),
            _mean(runs, "allocator_ms_per_step", 2),
        ]  # fmt: skip
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def limits(groups: dict[tuple[str, str], Results], reference: str) -> str:
    """Markdown: the reference at half and at twice the rollouts a step, same number of steps, by pool and batch."""
    names = (f"{reference}_half", reference, f"{reference}_double")
    lines = ["| pool | batch | seeds | " + " | ".join(names) + " | half − full | double − full |", "|---" * 8 + "|"]
    for (pool, batch), results in groups.items():
        common = set.intersection(*(set(results.get(name, {})) for name in names))
        if not common:
            continue
        values = {name: np.array([_by_problem(results[name][s], "final") for s in sorted(common)]) for name in names}
        row = [pool, batch, str(len(common)), *(f"{values[name].mean():.3f}" for name in names)]
        for name in (names[0], names[2]):
            found = paired_bootstrap(values[name] - values[reference])
            row.append(_interval(found if len(common) >= FEWEST_SEEDS else (found[0], np.nan, np.nan)))
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) if len(lines) > 2 else ""


def pools(groups: dict[tuple[str, str], Results], reference: str) -> str:
    """Markdown: the training problems as the policy meets them, and their headroom while the reference trains."""
    head = "| pool | batch | mean pass rate | never right | always right | headroom: start, half-way, end |"
    lines = [head, "|---" * 6 + "|"]
    for (pool, batch), results in groups.items():
        runs = list(results.get(reference, {}).values())
        if runs:
            found = [run["pool"] for run in runs]
            rooms = [[x for x in when if x is not None] for when in zip(*(f["headroom"] for f in found), strict=True)]
            row = [pool, batch] + [
                f"{np.mean([f[k] for f in found]):.3f}" for k in ("mean_pass_rate", "never_right", "always_right")
            ]
            row.append(", ".join(f"{np.mean(x):.2f}" if x else "none" for x in rooms))
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def draw(results: Results, reference: str, title: str) -> bytes:
    """PNG: held-out curves, mixed groups, α, budgets by pass rate early and late, differences, class transitions."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 14), layout="constrained")
    figure.suptitle(title)
    grid = figure.subplots(3, 3)
    final = differences(results, reference, "final")
    equal = [m for m in results if m == reference or m in final]
    ranked = sorted(final, key=lambda m: final[m][0])
    shown = list(dict.fromkeys([reference, *[m for m in ("coba", "knapsack", "rank") if m in final], *ranked[::-1]]))
    shown = [m for m in shown if m in equal][:9]
    colours = dict(zip(shown, matplotlib.color_sequences["tab10"], strict=False))
    for method in shown:
        style = {"color": colours[method], "label": method, "linewidth": 2.5 if method == reference else 1.2}
        runs = list(results[method].values())
        spent = np.linspace(0, max(run["rollouts"] for run in runs), 60)
        average = f"avg@{runs[0]['samples']}"
        curve = [[e["rollouts"] for e in run["evaluations"]] for run in runs]
        held = [np.interp(spent, x, [e[average] for e in r["evaluations"]]) for x, r in zip(curve, runs, strict=True)]
        grid[0, 0].plot(spent, np.mean(held, axis=0), **style)
        for axes, name in ((grid[0, 1], "mixed_groups"), (grid[0, 2], "entropy"), (grid[1, 0], "alpha")):
            share = np.linspace(0, 1, 24)
            known = [
                [(x, y) for x, y in zip(r["curves"]["share"], r["curves"][name], strict=True) if y is not None]
                for r in runs
                if name in r["curves"]
            ]
            got = [np.interp(share, [x for x, _ in points], [y for _, y in points]) for points in known]
            if got:
                axes.plot(share * runs[0]["rollouts"], np.mean(got, axis=0), **style)
        for axes, part in ((grid[1, 1], "early"), (grid[1, 2], "late")):
            points = np.array([point for run in runs for point in run["budget_by_rate"].get(part, [])])
            if len(points):
                place = np.minimum((points[:, 0] * 10).astype(int), 9)
                weight = np.bincount(place, points[:, 2], 10)
                kept = weight >= 20
                at, budget = (np.bincount(place, points[:, i] * points[:, 2], 10)[kept] / weight[kept] for i in (0, 1))
                axes.plot(at, budget, marker="o", markersize=3, **style)
    names = ("held-out pass rate", "share of mixed groups", "entropy", "α")
    for axes, name in zip((*grid[0], grid[1, 0]), names, strict=True):
        axes.set(xlabel="rollouts", ylabel=name)
    for axes, part in ((grid[1, 1], "first"), (grid[1, 2], "last")):
        axes.set(xlabel="estimated pass rate", ylabel="mean budget", title=f"{part} third of the steps", xlim=(0, 1))
    bars = grid[2, 0]
    for y, method in enumerate(ranked):
        mean, low, high = final[method][:3]
        spread = [[0.0], [0.0]] if np.isnan(low) else [[mean - low], [high - mean]]
        bars.errorbar([mean], [y], xerr=np.maximum(spread, 0), fmt="o", color="black", capsize=2, markersize=4)
    bars.set(yticks=range(len(ranked)), yticklabels=ranked, title=f"held-out pass rate − {reference}, 95 %")
    bars.axvline(0, color="grey", linewidth=1)
    for axes, method in zip(grid[2, 1:], [reference, "coba" if "coba" in results else (ranked or [reference])[-1]],
                            strict=True):  # fmt: skip
        counts = np.sum([run["transitions"] for run in results.get(method, {}).values()], axis=0)
        if np.ndim(counts) != 2:
            axes.set_axis_off()
            continue
        share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        axes.imshow(share, vmin=0, vmax=1, cmap="Blues")
        for i, j in np.ndindex(*share.shape):
            axes.text(j, i, f"{share[i, j]:.2f}", ha="center", va="center", fontsize=8,
                      color="white" if share[i, j] > 0.6 else "black")  # fmt: skip
        ticks = {"xticks": range(5), "yticks": range(5), "yticklabels": DIFFICULTY_CLASSES}
        axes.set(title=f"{method}: class before → after", xlabel="after", ylabel="before", **ticks)
        axes.set_xticklabels(DIFFICULTY_CLASSES, rotation=30)
    for axes in (*grid[0], *grid[1]):
        axes.grid(alpha=0.3)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=70)
    return buffer.getvalue()


def _html_table(markdown: str) -> str:
    rows = [line.strip("| ").split(" | ") for line in markdown.splitlines() if not line.startswith("|---")]
    cells = [
        "".join(f"<{tag}>{html.escape(cell.strip())}</{tag}>" for cell in row)
        for tag, row in zip(["th"] + ["td"] * len(rows), rows, strict=False)
    ]
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"


STYLE = (
    "body{font:15px system-ui,sans-serif;margin:2em;max-width:1500px}table{border-collapse:collapse;font-size:12px}"
    "td,th{border:1px solid #ccc;padding:3px 7px;text-align:right}td:first-child,th:first-child{text-align:left}"
    "img{max-width:100%}"
)


def _machine_line(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return f"{machine['processor']}, {machine['cores']} cores, {versions}"


def write_report(study: Study, output: Path) -> str:
    """Writes report.md, report.html and cells.jsonl of the finished cells to ``output``; returns the Markdown."""
    stored = [(cell, result) for cell in study.cells if (result := cell.finished()) is not None]
    output.mkdir(parents=True, exist_ok=True)
    done = f"{len(stored)} of {len(study.cells)} cells are finished."
    if not stored:
        return done
    groups: dict[tuple[str, str], Results] = {}
    for cell in study.cells:  # methods in the study's order
        groups.setdefault((cell.pool, cell.batch), {}).setdefault(cell.method, {})
    for cell, result in stored:
        groups[cell.pool, cell.batch][cell.method][cell.seed] = result
    groups = {place: {m: runs for m, runs in found.items() if runs} for place, found in groups.items()}
    groups = {place: found for place, found in groups.items() if found}
    dates = sorted({result["date"] for _, result in stored})
    machines = list(dict.fromkeys(_machine_line(result["machine"]) for _, result in stored))
    about = (
        f"{done} Run {' to '.join(dict.fromkeys((dates[0], dates[-1])))} on {'; and on '.join(machines)}. "
        f"Differences are paired by seed and problem, with 95 % bootstrap intervals "
        f"over both from {FEWEST_SEEDS} seeds on; p by Holm over the methods of a table."
    )
    if len(machines) > 1:
        about += " Processors and versions round differently: pairs across them share a seed, not their first policy."
    parts = [("The pools", pools(groups, study.reference), b"")]
    if check := limits(groups, study.reference):
        parts.append(("Do rollouts limit learning?", check, b""))
    for (pool, batch), results in groups.items():
        title = f"{pool}, {batch}"
        parts.append((title, table(results, study.reference), draw(results, study.reference, title)))
    text = f"# {study.name}\n\n{about}\n" + "".join(f"\n## {title}\n\n{body}\n" for title, body, _ in parts)
    write_text(output / "report.md", text)
    page = f"<!doctype html><meta charset=utf-8><title>{html.escape(study.name)}</title><style>{STYLE}</style>"
    page += f"<h1>{html.escape(study.name)}</h1><p>{html.escape(about)}</p>"
    for title, body, picture in parts:
        page += f"<h2>{html.escape(title)}</h2>{_html_table(body)}"
        if picture:
            page += f'<p><img alt="{html.escape(title)}" src="data:image/png;base64,'
            page += base64.b64encode(picture).decode() + '"></p>'
    write_text(output / "report.html", page + "\n")
    write_text(output / "cells.jsonl", "".join(json.dumps(result) + "\n" for _, result in stored))
    return text
