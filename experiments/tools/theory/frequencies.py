"""Measure the basis of FFT sparsification: frequencies of gradients, the range-based float, the cost of stages.

Source: Wang et al., FFT-based Gradient Sparsification, HPDC 2020, arXiv 1811.08596.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

import micro
from experiments.reports import figure_parts as parts
from experiments.reports import plot_style as look
from experiments.reports.figure_parts import Panel
from experiments.reports.plot_style import style
from experiments.tools.shared.drawings import Content, named_lines
from experiments.tools.shared.methods import build_methods
from experiments.tools.shared.selection_times import TIMES, timed, timing_gradient
from experiments.tools.theory.figures import FREQUENCIES, draw_histogram
from experiments.tools.theory.measure import histogram_numbers
from micro.codecs import coding
from micro.density.base import target_count
from micro.kernels import preparing
from micro.predicted_traffic import volume_of
from micro.zoo.range_float import Format, RangeFloat, best_mantissa, num_magnitudes
from micro.zoo.spectrum import from_spectrum_, real_parts, strongest, to_spectrum

HALVES = {"half precision": torch.float16, "bfloat16": torch.bfloat16}
WIDTHS = range(4, 17)  # tried bits of the range-based float
DRAWN_WIDTHS = (6, 8, 10)
MOST_VALUES = 300  # most values drawn per format
WORKERS = (2, 4, 8, 16, 32)
KEY = (0, 0, 0)  # not used: nothing is rounded at random
MESSAGES = "reading a message"  # the stage that runs once per worker


def files(vectors: Mapping[str, Tensor], times: pd.DataFrame, density: float) -> Iterator[tuple[str, Content]]:
    """Yield the name and content of each file; ``vectors``: gradients (d,); formats are tested on the last.

    Args:
        times: of ``stage_times``.
    """
    numbers = pd.concat({name: _histograms(vector) for name, vector in vectors.items()}, names=["vector", None])
    numbers, (name, last) = numbers.reset_index("vector").reset_index(drop=True), list(vectors.items())[-1]
    yield "frequencies", (draw_histogram(numbers, "Gradients of rank 0 above, their frequencies below"), numbers)
    sent = real_parts(to_spectrum(last))
    values, errors = format_values(sent), format_errors(sent)
    yield "range-float", (draw_values(values, f"Numbers of each format, up to the largest frequency of {name}"), values)
    yield "range-float-error", (draw_errors(errors, f"Error of the frequencies of {name} in few bits"), errors)
    if times["numel"].nunique() > 1:
        title = f"Stages of FFT sparsification on one rank, density {density:g}"
        yield "stages", (draw_stages(times, title), times)
        rates = paying_rates(times, density)
        yield "link", (draw_rates(rates, "Below its line FFT sparsification saves more time than it takes"), rates)


def _histograms(vector: Tensor) -> pd.DataFrame:
    of_frequencies = histogram_numbers(real_parts(to_spectrum(vector))).drop(columns="value")
    return histogram_numbers(vector).join(of_frequencies.add_suffix(FREQUENCIES))


def format_values(values: Tensor) -> pd.DataFrame:
    """Return each format's positive numbers up to the largest of ``values``, and the relative gap to the next.

    Columns format, value, gap.
    """
    largest = values.abs().max()
    found = {name: torch.arange(1, 0x7C00, dtype=torch.int16).view(kind).float() for name, kind in HALVES.items()}
    for bits in DRAWN_WIDTHS:
        codes = torch.arange(1, num_magnitudes(bits) + 1, dtype=torch.int32)
        form = Format.ending_at(largest, bits, best_mantissa(values, largest, bits))
        found[f"range float, {bits} bits"] = form.magnitudes(codes)
    lowest = min(float(numbers[0]) for name, numbers in found.items() if name not in HALVES) / 4
    rows = []
    for name, numbers in found.items():
        shown = numbers[(numbers >= lowest) & (numbers <= largest)]
        gaps, step = shown.diff() / shown[:-1], len(shown) // MOST_VALUES + 1
        rows.append(pd.DataFrame({"format": name, "value": shown[:-1][::step], "gap": gaps[::step]}))
    return pd.concat(rows, ignore_index=True)


def format_errors(values: Tensor) -> pd.DataFrame:
    """Return ||rounded - x|| / ||x|| of ``values`` (count,) in each format; columns format, bits, error."""
    rounded = {(name, 16): values.to(kind).float() for name, kind in HALVES.items()}
    for bits in WIDTHS:
        codec = RangeFloat(bits=bits)
        wire = coding.encode(codec, values, KEY)
        rounded["range float", bits] = coding.decode(codec, wire, values.numel(), values.dtype)
    rows = [(*key, float((found - values).norm() / values.norm())) for key, found in rounded.items()]
    return pd.DataFrame(rows, columns=["format", "bits", "error"])


def stage_times(lengths: Sequence[int], density: float, repeats: int) -> pd.DataFrame:
    """Time each stage of a step of FFT sparsification on this rank; columns method (the stage), numel, TIMES."""
    preparing.prepare()
    found = [(numel, name, work) for numel in lengths for name, work in _stages(numel, density).items()]
    rows = [{"method": name, "numel": numel} | timed(work, repeats) for numel, name, work in found]
    return pd.DataFrame(rows, columns=["method", "numel", *TIMES])


def _stages(numel: int, density: float) -> dict[str, Callable[[], object]]:
    codec, gradient = _method(density).codec, timing_gradient(numel, density)
    spectrum = to_spectrum(gradient)
    count = target_count(density, spectrum.numel())
    kept = real_parts(strongest(spectrum, count)[0].values)
    wire = coding.encode(codec, kept, KEY)
    return {
        "transform": partial(to_spectrum, gradient),
        "selection": partial(strongest, spectrum, count),
        "rounding": partial(coding.encode, codec, kept, KEY),
        MESSAGES: partial(coding.decode, codec, wire, 2 * count, kept.dtype),
        "transform back": lambda: from_spectrum_(spectrum.clone(), numel),
    }


def paying_rates(times: pd.DataFrame, density: float) -> pd.DataFrame:
    """Return the rate of a link at which the saved time equals the stages' time; columns numel, workers, rate.

    0 if nothing is saved. All workers read each message; bytes are those that a worker sends in a ring.
    """
    method, dense, rows = _method(density), micro.DenseReducer(), []
    for numel, own in times.groupby("numel"):
        taken = own.set_index("method")["select_s"]
        for workers in WORKERS:
            ours, theirs = (volume_of(each, int(str(numel)), workers).between_bytes for each in (method, dense))
            seconds = taken.sum() + (workers - 1) * taken[MESSAGES]
            rows.append({"numel": numel, "workers": workers, "rate": max(0.0, 8 * (theirs - ours) / seconds)})
    return pd.DataFrame(rows)


def _method(density: float) -> Any:
    (method,) = build_methods(["fft"], density).values()
    return method


@style()
def draw_values(numbers: pd.DataFrame, title: str) -> Figure:
    """Draw the gap to the next number over the numbers, a mark for each; columns format, value, gap."""
    panel = Panel(x="value", y="gap", x_name="number", y_name="gap to the next / number")
    return _lines(numbers, "format", panel, title)


@style()
def draw_errors(numbers: pd.DataFrame, title: str) -> Figure:
    """Draw the error over bits of the range float, and those of 16-bit formats; columns format, bits, error."""
    panel = Panel(x="bits", y="error", x_name="bits of a number", y_name="||rounded - x|| / ||x||")
    return _lines(numbers, "format", panel, title, show_x=lambda axis: axis.set_ticks(list(WIDTHS)))


@style()
def draw_stages(numbers: pd.DataFrame, title: str) -> Figure:
    """Draw gigabytes of gradient per second of each stage, with quartiles; columns method, numel, TIMES."""
    ends = dict(zip(("rate", "rate_min", "rate_max"), ("select_s", "select_s_high", "select_s_low"), strict=True))
    rates = numbers.assign(**{name: 4e-9 * numbers["numel"] / numbers[taken] for name, taken in ends.items()})
    panel = Panel(x="numel", y="rate", x_name="elements d", y_name="gradient (GB/s)")
    return _lines(rates, "method", panel, title)


@style()
def draw_rates(numbers: pd.DataFrame, title: str) -> Figure:
    """Draw the rate of a link at which the stages pay, over elements, by number of workers; see ``paying_rates``.

    No mark if nothing is saved.
    """
    shown = numbers[numbers["rate"] > 0].assign(rate=lambda rows: rows["rate"] / 1e9)
    shown = shown.assign(workers=shown["workers"].map("{} workers".format))
    panel = Panel(x="numel", y="rate", x_name="elements d", y_name="bandwidth of a link (Gbit/s)")
    return _lines(shown, "workers", panel, title)


def _lines(rows: pd.DataFrame, by: str, panel: Panel, title: str, show_x: parts.Show = parts.plain_log) -> Figure:
    """Draw a line for each value of a column, on logarithmic axes."""
    lines = named_lines([by], look.lines_of((name,) for name in dict.fromkeys(rows[by])), str)
    shown = replace(panel, show_x=show_x, show_y=parts.plain_log)
    return parts.figure_of_lines(title, rows, [shown], lines, height=3.4)
