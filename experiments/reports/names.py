"""Display names of methods, models and data sets, and the order of methods; imports no drawing library.

A method is described by the comments at the head of its conf/sparsifier/NAME.yaml::

    # label: Top-k, gather    its name in tables and legends
    # order: 30               its place in tables and legends
    # legend: Top-k           its name in legends, where that says more than the label

A method without such a file or comment is called by its key and comes last. One whose parts no yaml has (see
config/method_names.py) is called by the nearest yaml and what differs: ``Top-k, exchange oktopk``.
"""

from collections.abc import Iterable

from experiments.config.method_names import description, place

KINDS = (  # of figures of finished runs
    *("convergence", "time", "density", "residual", "methods", "densities", "bytes", "lengths", "throughput"),
)
OTHERS = {  # models, data sets and schedules by the key of their registry
    "mlp": "MLP",
    "cnn_lstm": "CNN-LSTM",
    "lstm": "LSTM",
    "gpt": "GPT",
    "bert_base": "BERT",  # its size is a setting
    "neumf": "NeuMF",
    "googlenet": "GoogLeNet",
    "googlenet_cifar": "GoogLeNet for CIFAR",
    "inception_v4": "Inception-v4",
    **{f"resnet{depth}": f"ResNet-{depth}" for depth in (8, 18, 20, 34, 50, 56, 110, 152)},
    "senet18": "SENet-18",
    "seresnet18": "SE-ResNet-18",
    "vgg16_bn": "VGG-16",
    "vgg19_bn": "VGG-19",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "imagenet": "ImageNet",
    "movielens100k": "MovieLens-100K",
    "movielens1m": "MovieLens-1M",
    "movielens20m": "MovieLens-20M",
    "latent": "latent factors",
    "ptb": "Penn Treebank",
    "wikitext2": "WikiText-2",
    "manuals": "Python manual",
    "manuals_bytes": "Python manual, bytes",
    "text": "a folder of text",
    "layerwise": "by layer (WFBP)",
    "single": "one bucket",
    "mgwfbp": "merged (MG-WFBP)",
    "exact": "exact plan",
    "ddp": "DDP's own",
    "ethernet_1gbit": "1 Gbit/s",
    "ethernet_10gbit": "10 Gbit/s",
    "gaussiank_ib": "InfiniBand (16 ranks)",
    "v100_56gib": "56 Gbit/s InfiniBand",
}


def label(method: str, variant: str = "", key: str = "label") -> str:
    """Return the name of a method in tables."""
    base, *others = method.split("+")
    known = description(base)
    name = ", ".join([known.get(key, known.get("label", base)), *(part.replace("_", " ", 1) for part in others)])
    return f"{name} ({variant})" if variant else name


def in_legend(method: str, variant: str = "") -> str:
    """Return the name of a method in figures, which says of which rule it is where there are several."""
    return label(method, variant, "legend")


def human(name: str) -> str:
    """Return the name of a model, data set or schedule for people; ``name`` itself where none is known."""
    return OTHERS.get(name, name)


def in_order(methods: Iterable[str]) -> list[str]:
    """Return the distinct methods in the order of their files, those without one last by name."""
    return sorted(set(methods), key=place)
