"""The pages of studies of language models: what columns mean, a table, what is not finished, where runs come from."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from experiments.config.units import human_bytes
from experiments.reports.csv_files import write_csv
from experiments.reports.figure_parts import save
from experiments.reports.link_times import FRAME, LATENCY_S
from experiments.reports.markdown import table
from experiments.reports.names import human, label
from experiments.reports.output import write_file
from experiments.reports.provenance import described
from experiments.reports.run_rows import origins_of
from experiments.reports.tokens.curves import curves
from experiments.reports.tokens.figures import (
    draw_by_density,
    draw_by_passes,
    draw_by_rate,
    draw_by_workers,
    draw_losses,
)
from experiments.reports.tokens.forms import Form, Plan, forms_of
from experiments.reports.tokens.pairs import gains
from experiments.reports.tokens.points import lines
from experiments.reports.tokens.rows import compute_s_of, rows

EXPLAINED = """\
Each row is the mean over n seeds, ± half the range; less is better, and with one seed nothing is said of the spread.
*To dense* is how many bits per byte it has more than dense training with as many workers that exchange gradients at
every step. *Density* is the share of elements that an update touches, a mean over exchanges. *Sent* is what rank 0
sends, in kB for each batch that it takes. *Manifests* is a digest of the rows' manifests, which hold code, machine,
versions and data."""

ACROSS = """\
Bits per byte of each form at each rate, one run each; less is better. *Rate* is the best of them, and *to dense* how
many bits per byte the form has there more than dense training that exchanges gradients at every step at its own best
rate. *Manifests* is a digest of that run's manifest, which holds code, machine, versions and data."""

SECONDS = """\
*100 Mbit/s* and *1 Gbit/s* are seconds of the whole run on such links, simulated:
{computation} to compute, the least of all runs' medians and the same for all forms, and what each exchange recorded,
{latency_us:g} us a message of a ring and {frame:.4g} bytes on the wire for one that is sent. Nothing is hidden, and
selection and the optimizer are not in it."""

CURVES = """\
In the figure over tokens, bytes and seconds are losses on the test set, within a round with the weights of the last
one; each line is the mean over the n runs that were evaluated before their ends."""

GAINS = """\
By how many bits per byte each worker's own step ends lower than gradients, with the same method, density and seed; mean
and range over the pairs:"""


Draw = Callable[[pd.DataFrame, Plan, pd.DataFrame, str], tuple[Figure, pd.DataFrame] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What a study's page has.

    Attributes:
        name: of its files.
        title: its first line.
        columns: of its table, by their headings in COLUMNS.
        by: the column of ``rows`` by which its table is sorted, before bits per byte.
        across: the column of ``rows`` whose values have a column of bits per byte each, empty where there is none.
        has_one_world: whether all forms have as many workers.
        studies: further ones whose runs are on the page.
        more: paragraphs after the table, from points.
        draw: figures by the ends of their files' names: each and its numbers, or None where there is nothing to draw.
            From points, the plan, ``rows`` and a title.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    by: str
    across: str = ""
    has_one_world: bool = True
    studies: tuple[str, ...] = ()
    more: Callable[[pd.DataFrame, Plan], Iterable[str]]
    draw: Mapping[str, Draw]


def write_page(study: str, points: pd.DataFrame, plan: Plan, out: Path) -> list[Path]:
    """Write the page of a study, its figures with their numbers, and a CSV with a line per run; return the paths.

    Args:
        study: a key of PAGES.
        points: of ``points``.
        plan: all runs of the study.

    Raises:
        UserError: none of its runs is finished.
    """
    page, found = PAGES[study], rows(points, plan)
    runs, title = sorted(points["run"].unique()), _setting(page, forms_of(plan)[0])
    write_csv(lines(points), known := out / f"{page.name}_runs.csv")
    paths = [write_file(out / f"{page.name}.md", markdown(page, points, plan, found)), known]
    for end, draw in page.draw.items():
        if drawn := draw(points, plan, found, title):
            figure, numbers = drawn
            paths += save(figure, numbers, out / f"{page.name}{end}", runs)
    return paths


def markdown(page: Page, points: pd.DataFrame, plan: Plan, found: pd.DataFrame) -> str:
    """Return a page: what its columns mean, its table, what is not finished, where its runs come from."""
    runs = sorted(points["run"].unique())
    blocks = [
        f"# {page.title}",
        f"{_setting(page, forms_of(plan)[0])}; {_training(forms_of(plan))}.",
        ACROSS if page.across else EXPLAINED,
        _table_across(page, found) if page.across else _table(page, found),
        *page.more(points, plan),
        *_unfinished(set(runs), plan, is_across=bool(page.across)),
        f"Runs, with {described(origins_of(points.drop_duplicates('run')), runs)}.",
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _table(page: Page, found: pd.DataFrame) -> str:
    """Return a table with a row per form."""
    keys = list(dict.fromkeys([page.by, "world_size", "bits_per_byte"]))
    ordered = found.sort_values(keys, ascending=[key != "density" for key in keys])
    return table(page.columns, [[COLUMNS[name](row) for name in page.columns] for _, row in ordered.iterrows()])


def _table_across(page: Page, found: pd.DataFrame) -> str:
    """Return a table with a row per form of a study in which ``page.across`` varies: the columns at its best value."""
    values = sorted(found[page.across].unique())
    forms = list(found.sort_values("bits_per_byte").groupby(["name", "density"], sort=False))
    cells = [
        [COLUMNS[name](own.iloc[0]) for name in page.columns]
        + [_of_value(own.loc[own[page.across] == value, "bits_per_byte"]) for value in values]
        for _, own in forms
    ]
    return table([*page.columns, *(f"at {value:g}" for value in values)], cells)


def _of_value(found: pd.Series) -> str:
    return f"{found.iloc[0]:.3f}" if len(found) else ""


def _setting(page: Page, form: Form) -> str:
    what = f"{human(str(form.config['model.name']))} on {human(str(form.config['dataset.name']))}"
    return f"{what}, {form.world_size} workers" if page.has_one_world else what


def _training(forms: Sequence[Form]) -> str:
    """Say how the forms of a study are trained, as far as they have it in common."""
    first, optimizer = forms[0], forms[0].config["optimizer.name"]
    passes = {form.passes for form in forms}
    rates = {form.rate for form in forms if form.config["optimizer.name"] == optimizer}
    length = "one pass" if passes == {1} else f"{first.passes} passes" if len(passes) == 1 else "passes as in the table"
    shape = f"({first.config['lr_shape']}) unless a form says otherwise"
    at = f"at a rate of {first.rate:g} {shape}" if len(rates) == 1 else "at the rates of the table"
    for other in sorted({form.config["optimizer.name"] for form in forms} - {optimizer}, key=str):
        labels = dict.fromkeys(label(form.method) for form in forms if form.config["optimizer.name"] == other)
        at += f"; {other} with {' and '.join(f'*{name}*' for name in labels)}"
    return f"{length}, {first.step_tokens} tokens of all workers for a batch of each, {optimizer} {at}"


def _unfinished(known: Set[str], plan: Plan, *, is_across: bool) -> list[str]:
    """Say how many runs are finished, and which are not; in a table across values, empty cells say that."""
    finished = f"{len(known & set(plan))} of the study's {len(plan)} runs are finished."
    if is_across:
        return [f"{finished} An empty cell: that value was not tried, or its run is not finished."]
    names = defaultdict(list)
    for form in forms_of(plan):
        if (done := len(known & set(form.runs))) < len(form.runs):
            names[f"{done} of {len(form.runs)} seeds"].append(_full_name(form))
    return [finished, *(f"{seeds}: {'; '.join(forms)}." for seeds, forms in sorted(names.items()))]


def _full_name(form: Form) -> str:
    return f"{form.name}{'' if form.method == 'dense' else f' at {form.density:.3g}'}, {form.world_size} workers"


def _seconds(points: pd.DataFrame, plan: Plan) -> list[str]:
    found = sorted(compute_s_of(points, plan).items(), reverse=True)
    of_sizes = [f"{1e3 * seconds:.3g} ms for a worker's batch of {size}" for size, seconds in found]
    simulated = SECONDS.format(computation=" and ".join(of_sizes), latency_us=1e6 * LATENCY_S, frame=FRAME)
    return [simulated] if curves(points, plan).empty else [simulated, CURVES]


def _over_all(points: pd.DataFrame, plan: Plan, found: pd.DataFrame, title: str) -> tuple[Figure, pd.DataFrame] | None:
    numbers = curves(points, plan)
    return None if numbers.empty else (draw_losses(numbers, found, title), numbers)


def _gains(points: pd.DataFrame, plan: Plan) -> list[str]:
    found = gains(points, plan)
    if found.empty:
        return []
    found = found.sort_values(["passes", "world_size", "density", "gain"], ascending=[True, True, False, False])
    varied = [name for name, key in (("passes", "passes"), ("workers", "world_size")) if found[key].nunique() > 1]
    names = ["method", "target", *varied]
    cells = [
        [*(COLUMNS[name](row) for name in names), f"{row['num_pairs']}", _signed(row["gain"]), _range(row)]
        for _, row in found.iterrows()
    ]
    return [GAINS, table([*names, "pairs", "gain", "range"], cells)]


def _signed(value: float) -> str:
    return f"{value:+.3f}"


def _range(row: pd.Series) -> str:
    return f"{_signed(row['low'])} to {_signed(row['high'])}"


def _kilobytes(count: float) -> str:
    return f"{count / 1e3:.0f}" if count >= 1e5 else f"{count / 1e3:.3g}"


def _spread(measure: str) -> Callable[[pd.Series], str]:
    def show(row: pd.Series) -> str:
        half_range = f" ± {row[f'{measure}_half_range']:.3f}" if row["num_seeds"] > 1 else ""
        return f"{row[measure]:.3f}{half_range}"

    return show


COLUMNS: dict[str, Callable[[pd.Series], str]] = {
    "method": lambda row: label(row["method"]),
    "what is exchanged": lambda row: str(row["exchanged"]),
    "rate": lambda row: f"{row['rate']:g}",
    "passes": lambda row: f"{row['passes']}",
    "workers": lambda row: f"{row['world_size']}",
    "batch": lambda row: f"{row['batch_size']}",
    "target": lambda row: "-" if row["method"] == "dense" else f"{row['density']:.3g}",
    "n": lambda row: f"{row['num_seeds']}",
    "bits per byte": _spread("bits_per_byte"),
    "test loss": _spread("test_loss"),
    "to dense": lambda row: "" if pd.isna(row["to_dense"]) else _signed(row["to_dense"]),
    "density": lambda row: f"{row['measured_density']:.3g}",
    "sent, kB": lambda row: _kilobytes(row["batch_bytes"]),
    "in all": lambda row: human_bytes(row["total_bytes"]),
    "100 Mbit/s": lambda row: f"{row['at_100mbit_ms']:.3g}",
    "1 Gbit/s": lambda row: f"{row['at_1gbit_ms']:.3g}",
    "manifests": lambda row: f"`{row['manifests']}`" if row["manifests"] else "-",
}
_REACHED = ("n", "bits per byte", "test loss", "to dense", "density", "sent, kB")
_SECONDS = ("in all", "100 Mbit/s", "1 Gbit/s")

PAGES = {
    "gpt_equal_tokens": Page(
        name="equal_tokens",
        title="Local steps at equal tokens",
        columns=("method", "what is exchanged", "target", *_REACHED, *_SECONDS, "manifests"),
        by="world_size",
        more=_seconds,
        draw={"": _over_all},
    ),
    "gpt_under_adam": Page(
        name="under_adam",
        title="Where to sparsify under Adam",
        columns=("method", "what is exchanged", "target", *_REACHED, "manifests"),
        by="density",
        more=_gains,
        draw={"": lambda points, plan, found, title: (draw_by_density(found, title), found)},
    ),
    "gpt_workers": Page(
        name="workers",
        title="More workers at an equal total batch",
        columns=("method", "workers", "batch", "target", *_REACHED, "manifests"),
        by="world_size",
        has_one_world=False,
        more=lambda points, plan: (),
        draw={"": lambda points, plan, found, title: (draw_by_workers(found, title), found)},
    ),
    "gpt_rates": Page(
        name="rates",
        title="Which rate each form wants",
        columns=("method", "what is exchanged", "target", "rate", "bits per byte", "to dense", "manifests"),
        by="world_size",
        across="rate",
        studies=("gpt_rates_rounds", "gpt_rates_seldom", "gpt_rates_signs", "gpt_rates_steps", "gpt_rates_densities"),
        more=lambda points, plan: (),
        draw={"": lambda points, plan, found, title: (draw_by_rate(found, title), found)},
    ),
    "gpt_tuned": Page(
        name="tuned",
        title="Local steps and gradients, each at its own rate",
        columns=(
            "method",
            "what is exchanged",
            "target",
            "rate",
            "passes",
            "workers",
            *_REACHED,
            *_SECONDS,
            "manifests",
        ),
        by="passes",
        has_one_world=False,
        studies=("gpt_tuned_rounds", "gpt_tuned_workers"),
        more=lambda points, plan: (*_gains(points, plan), *_seconds(points, plan)),
        draw={
            "": lambda points, plan, found, title: (draw_by_passes(found, title), found),
            "_curves": _over_all,
        },
    ),
}
