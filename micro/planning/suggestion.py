"""Which method to begin with: the predicted seconds of its exchange, and the epochs that published trainings took."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from micro.codecs.half import BFloat16
from micro.flat import Layout
from micro.planning.costs import Flat, Link
from micro.planning.volumes import calls_of
from micro.reducers.base import Reducer
from micro.reducers.powersgd import PowerSGD
from micro.reducers.sparse import SparseReducer
from micro.selectors.everything import Everything
from micro.selectors.micro import Micro

DENSE = "bf16"
BACKWARD = 2 / 3  # of a step's computation: dense buckets travel beside it


class Evidence(NamedTuple):
    """Published trainings: the epochs to 95 % of dense's end, of dense's, and MiCRO's density there."""

    source: str
    epochs: Mapping[str, float]
    density: float


WEIGHTS = Evidence(
    "ResNet-8 on CIFAR-10, results/published/advice_cifar10.md",
    {DENSE: 1.0, "powersgd": 18 / 16.7, "micro": 18.3 / 16.7},
    density=0.01,
)
EMBEDDINGS = Evidence(
    "NeuMF on MovieLens 100K, results/published/advice.md",
    {DENSE: 1.0, "powersgd": 7.67 / 7, "micro": 12.7 / 7},
    density=0.1,
)


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A method to begin with.

    Attributes:
        reducer: for `micro.attach`.
        why: two lines: the predicted seconds of each method, and the evidence for its epochs.
        exchange_s: the predicted seconds that each method's exchange takes in a step, its selection included.
        dense_from_s: seconds of a step's computation from which dense training in bfloat16 comes first.
    """

    reducer: Reducer
    why: str
    exchange_s: Mapping[str, float]
    dense_from_s: float


def suggest(
    model: nn.Module,
    *,
    link_mbit: float,
    world_size: int,
    compute_s: float = 0.0,
    latency_us: float = 50.0,
    memory_gb_s: float = 10.0,
) -> Suggestion:
    """Return which of dense in bfloat16, PowerSGD and MiCRO is predicted to come first to 95 % of dense's end.

    The seconds of a step are computation and exchange: of a ring of equal links, from what each part says that it
    sends, and of what selection moves through memory. Dense buckets travel beside backward, two thirds of the
    computation, the others after it. The epochs are those of a published training: of NeuMF where more than half of the
    parameters are embeddings, else of ResNet-8. Nothing is measured on this machine: `experiments.advise` and
    `experiments.doctor` say more.

    Args:
        model: its parameters that need gradients are exchanged.
        link_mbit: the rate of each worker's link, in Mbit/s.
        world_size: number of workers.
        compute_s: seconds that a worker computes in a step; 0, where it is not known, favours what sends least.
        latency_us: of a message.
        memory_gb_s: the rate at which a worker reads and writes memory.

    Raises:
        ValueError: a number out of range, or a model without parameters that need gradients.
    """
    _check_positive(link_mbit=link_mbit, world_size=world_size, memory_gb_s=memory_gb_s)
    if not (compute_s >= 0 and latency_us >= 0):
        raise ValueError(f"compute_s and latency_us must be at least 0, got {compute_s} and {latency_us}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("model must have parameters that need gradients, got none")
    layout = Layout.of(model)
    evidence = EMBEDDINGS if _num_in_embeddings(model) > layout.numel / 2 else WEIGHTS
    reducers = {
        DENSE: SparseReducer(Everything(), density=1.0, codec=BFloat16()),
        "powersgd": PowerSGD(rank=4),
        "micro": SparseReducer(Micro(), density=evidence.density),
    }
    moved = {DENSE: 0.0, "powersgd": 48.0, "micro": 16 + 4 / world_size}  # bytes of memory for each element
    network = Flat(Link(latency_us / 1e6, 8e-6 / link_mbit), world_size)
    exchange_s = {
        name: sum(network.seconds(*call) for call in calls_of(reducer, layout.numel, world_size, layout=layout))
        + moved[name] * layout.numel / (1e9 * memory_gb_s)
        for name, reducer in reducers.items()
    }
    after_s = {**exchange_s, DENSE: max(exchange_s[DENSE] - BACKWARD * compute_s, 0.0)}
    best = min(reducers, key=lambda name: evidence.epochs[name] * (compute_s + after_s[name]))
    dense_from_s = max(
        (exchange_s[DENSE] - epochs * exchange_s[name]) / (epochs - 1 + BACKWARD)
        for name, epochs in evidence.epochs.items()
        if name != DENSE
    )
    seconds = ", ".join(f"{name} {value:.3g} s" for name, value in exchange_s.items())
    epochs = ", ".join(f"{name} {value:.2f}" for name, value in evidence.epochs.items())
    why = (
        f"{best}: a step's exchange is predicted to take {seconds} ({world_size} workers, {link_mbit:g} Mbit/s); "
        f"{DENSE} comes first where a step computes for {max(dense_from_s, 0.0):.3g} s or longer\n"
        f"epochs to 95 % of dense's end, of dense's: {epochs} ({evidence.source})"
    )
    return Suggestion(reducers[best], why, exchange_s, max(dense_from_s, 0.0))


def _check_positive(**positive: float) -> None:
    for name, value in positive.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")


def _num_in_embeddings(model: nn.Module) -> int:
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    return sum(weight.numel() for weight in set(tables) if weight.requires_grad)
