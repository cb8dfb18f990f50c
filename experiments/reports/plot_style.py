"""How every figure looks: sizes, fonts, one colour per method, names for people, files with reproducible bytes."""

import math
import textwrap
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator

from experiments.reports.measures import Metric

COLUMN_INCHES, PAGE_INCHES = 3.4, 7.0  # one and both columns of a two-column paper

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so the same everywhere
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "legend.title_fontsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.4,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "pdf.fonttype": 42,  # TrueType: some publishers refuse Type 3
    "svg.hashsalt": "micro",
    "savefig.dpi": 200,
}

# Okabe and Ito's colours, told apart with any colour vision; grey stands in for their yellow, too light for lines.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#999999"
PALETTE = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, BLACK)

DASHED, DOTTED, DASHDOT, LONG = (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2))
Dashes = tuple[int, tuple[float, ...]] | str
DASHES: tuple[Dashes, ...] = ("-", DASHED, DOTTED, DASHDOT, LONG)
MARKERS = "os^vDPX<>*ph"


@dataclass(frozen=True, slots=True)
class Look:
    """How one method is named and drawn; colour, dashes and marker together are its own."""

    name: str
    color: str
    dashes: Dashes
    marker: str


# A method's variants share colour and marker; dashes tell them apart: drawn through as repaired, dashed as published.
LOOKS = {
    "dense": Look("Dense", BLACK, "-", "o"),
    "topk": Look("Top-k", BLUE, DASHED, "s"),
    "topk_gather": Look("Top-k, gather", BLUE, DOTTED, "s"),
    "topk_layers": Look("Top-k, per layer", BLUE, DASHDOT, "s"),
    "topk_small": Look("Top-k, small", BLUE, LONG, "s"),
    "topk_range_float": Look("Top-k, range float", BLUE, "-", "s"),
    "topk_int8": Look("Top-k, int8", BLUE, DASHED, "d"),
    "topk_fp16": Look("Top-k, fp16", BLUE, DOTTED, "d"),
    "topk_qsgd": Look("Top-k, QSGD", BLUE, DASHDOT, "d"),
    "cltk": Look("CLT-k", SKY, DASHDOT, "^"),
    "cltk_published": Look("CLT-k, published", SKY, DASHED, "^"),
    "threshold": Look("Hard-threshold", GREEN, DOTTED, "v"),
    "randomk": Look("Random-k", GREY, LONG, "P"),
    "randomk_unbiased": Look("Random-k, unbiased", GREY, DOTTED, "P"),
    "micro": Look("MiCRO", VERMILLION, "-", "D"),
    "micro_repaired": Look("MiCRO, repaired", PURPLE, "-", "<"),
    "micro_published": Look("MiCRO, published", GREY, DASHED, ">"),
    "micro_small": Look("MiCRO, small", VERMILLION, LONG, "D"),
    "micro_tensors": Look("MiCRO, per tensor", VERMILLION, DASHDOT, "D"),
    "exdyna": Look("ExDyna", GREEN, "-", "p"),
    "exdyna_published": Look("ExDyna, published", GREEN, DASHED, "p"),
    "deft": Look("DEFT", BLUE, "-", "h"),
    "deft_published": Look("DEFT, published", BLUE, DASHED, "h"),
    "gaussiank": Look("Gaussian-k", ORANGE, "-", "X"),
    "gaussiank_published": Look("Gaussian-k, published", ORANGE, DASHED, "X"),
    "sidco": Look("SIDCo", SKY, "-", "*"),
    "sidco_published": Look("SIDCo, published", SKY, DASHED, "*"),
    "dgc": Look("DGC", GREEN, "-", "<"),
    "dgc_published": Look("DGC, published", GREEN, DASHED, "<"),
    "redsync": Look("RedSync", BLUE, "-", ">"),
    "redsync_published": Look("RedSync, published", BLUE, DASHED, ">"),
    "sage": Look("SAGE", ORANGE, "-", "h"),
    "sage_published": Look("SAGE, published", ORANGE, DASHED, "h"),
    "gtopk": Look("gTop-k", SKY, "-", "X"),
    "gtopk_published": Look("gTop-k, published", SKY, DASHED, "X"),
    "oktopk": Look("Ok-Topk", BLUE, "-", "p"),
    "oktopk_published": Look("Ok-Topk, published", BLUE, DASHED, "p"),
    "dsa": Look("TopkDSA", SKY, "-", "v"),
    "dsa_published": Look("TopkDSA, published", SKY, DASHED, "v"),
    "accordion": Look("Accordion", PURPLE, "-", "P"),
    "accordion_published": Look("Accordion, published", PURPLE, DASHED, "P"),
    "fft": Look("FFT", PURPLE, DOTTED, "X"),
    "fft_feedback": Look("FFT, feedback", PURPLE, "-", "X"),
    "fft_published": Look("FFT, published", PURPLE, DASHED, "X"),
    "powersgd": Look("PowerSGD", PURPLE, "-", "s"),
    "powersgd_published": Look("PowerSGD, published", PURPLE, DASHED, "s"),
    "fp16": Look("fp16", BLACK, DASHED, "^"),
    "bf16": Look("bf16", BLACK, DASHED, "v"),
    "int8": Look("int8", BLACK, DOTTED, "D"),
    "qsgd": Look("QSGD", VERMILLION, "-", "*"),
    "qsgd_published": Look("QSGD, published", VERMILLION, DASHDOT, "*"),
    "qsgd_feedback": Look("QSGD, feedback", VERMILLION, DASHED, "*"),
    "terngrad": Look("TernGrad", VERMILLION, "-", "^"),
    "terngrad_published": Look("TernGrad, published", VERMILLION, DASHED, "^"),
    "natural": Look("Natural compression", VERMILLION, "-", "P"),
    "natural_published": Look("Natural compression, published", VERMILLION, DASHED, "P"),
    "signsgd": Look("signSGD", GREEN, "-", "s"),
    "signsgd_published": Look("signSGD, published", GREEN, DASHDOT, "s"),
    "signsgd_feedback": Look("signSGD, feedback", GREEN, DASHED, "s"),
    "onebit": Look("1-bit SGD", GREEN, "-", "D"),
    "onebit_published": Look("1-bit SGD, published", GREEN, DASHED, "D"),
}
NAMES = {
    "mlp": "MLP",
    "cnn_lstm": "CNN-LSTM",
    "lstm": "LSTM",
    "lstm_lm": "LSTM-LM",
    "bert_base": "BERT",  # its size is a setting
    "ncf": "NCF",
    "neumf": "NeuMF",
    "googlenet": "GoogLeNet",
    "googlenet_cifar": "GoogLeNet for CIFAR",
    "inception_v4": "Inception-v4",
    **{f"resnet{depth}": f"ResNet-{depth}" for depth in (8, 18, 20, 34, 50, 56, 110, 152)},
    "senet18": "SENet-18",
    "seresnet18": "SE-ResNet-18",
    "vgg16": "VGG-16",
    "vgg16_bn": "VGG-16",
    "vgg19_bn": "VGG-19",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "imagenet": "ImageNet",
    "movielens": "MovieLens",
    "movielens100k": "MovieLens-100K",
    "movielens1m": "MovieLens-1M",
    "movielens20m": "MovieLens-20M",
    "latent": "latent factors",
    "ptb": "Penn Treebank",
    "wikitext2": "WikiText-2",
    "manuals": "Python manual",
}


def look(sparsifier: str) -> Look:
    """How to draw a method; one without an entry in LOOKS gets a look that depends on its name alone."""
    if sparsifier in LOOKS:
        return LOOKS[sparsifier]
    code = zlib.crc32(sparsifier.encode())
    colors = PALETTE[:-1]  # black is the dense baseline's
    return Look(
        sparsifier, colors[code % len(colors)], DASHES[code // 7 % len(DASHES)], MARKERS[code // 64 % len(MARKERS)]
    )


def label(sparsifier: str, variant: str = "") -> str:
    """Name of a method in legends and tables."""
    return f"{look(sparsifier).name} ({variant})" if variant else look(sparsifier).name


def human(name: str) -> str:
    """Name of a model or data set for people; itself where none is known."""
    return NAMES.get(name, name)


def in_order(sparsifiers: Iterable[str]) -> list[str]:
    """Distinct methods in the order of LOOKS, then those unknown there by name."""
    known = list(LOOKS)
    return sorted(set(sparsifiers), key=lambda name: (known.index(name) if name in known else len(known), name))


@contextmanager
def style() -> Iterator[None]:
    """Draw and save inside this, or under it as a decorator: the caller's own settings neither matter nor change."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def new_figure(width: float, height: float) -> Figure:
    """A figure in inches that keeps its parts from overlapping and needs no display."""
    return Figure(figsize=(width, height), layout="constrained")


def head(figure: Figure, title: str, handles: Sequence[Artist]) -> None:
    """Put title and legend above the panels, where they cover no data, in as many columns as the width holds."""
    width = figure.get_figwidth()
    longest = max(len(str(handle.get_label())) for handle in handles)
    fitting = int(width / (0.051 * longest + 0.4))  # inches of a letter, and of a line sample with its gaps
    legend = figure.legend(
        handles=handles,
        title=textwrap.fill(title, int(15 * width)),
        loc="outside upper center",
        ncols=max(1, min(len(handles), fitting)),
    )
    legend.get_title().set_multialignment("center")


def show_metric(axis: XAxis | YAxis, metric: Metric) -> None:
    """Name an axis after a measure and write its numbers for people; call it when the data is drawn."""
    if not metric.higher_is_better:  # it falls by orders of magnitude
        plain_log(axis)
    axis.set_label_text(metric.label)
    axis.set_major_formatter(lambda value, _: metric.tick(value))


def show_percent(axes: Axes) -> None:
    """Write the y axis, fractions, as percent."""
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}")


def plain_log(axis: XAxis | YAxis) -> None:
    """Make an axis logarithmic, its ticks written as 0.01 0.02 0.05; call it when the data is drawn.

    One on which nothing above zero is drawn stays as it is.
    """
    if not math.isfinite(axis.get_minpos()):
        return
    scale = axis.axes.set_yscale if axis.axis_name == "y" else axis.axes.set_xscale
    scale("log", nonpositive="mask")
    low, high = axis.get_view_interval()
    if high < 5 * low:  # 1, 2 and 5 alone might leave no tick
        axis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        axis.set_minor_locator(NullLocator())
    else:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    plain_ticks(axis)


def plain_ticks(axis: XAxis | YAxis) -> None:
    """Write the numbers of an axis as 0.01, not as powers of ten."""
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


@style()
def save(figure: Figure, numbers: pd.DataFrame, stem: Path, runs: Iterable[str] = ()) -> list[Path]:
    """Write ``stem``.pdf, .png and the drawn numbers as .csv; same input, same bytes. Returns the paths.

    The names of the runs that the numbers come from, where there are any, go to ``stem``.runs.txt.
    """
    paths = [stem.with_name(f"{stem.name}{suffix}") for suffix in (".pdf", ".png", ".csv")]
    stem.parent.mkdir(parents=True, exist_ok=True)
    figure.draw_without_rendering()  # places the parts; once is enough for both files
    figure.set_layout_engine("none")
    figure.savefig(paths[0], metadata={"CreationDate": None})
    figure.savefig(paths[1])
    numbers.to_csv(paths[2], index=False, float_format="%.8g", lineterminator="\n")
    names = sorted(set(runs))
    if names:
        paths.append(stem.with_name(f"{stem.name}.runs.txt"))
        paths[-1].write_text("".join(f"{name}\n" for name in names))
    return paths
