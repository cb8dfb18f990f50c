"""Train deep networks on many workers with sparsified gradients.

    reducer = micro.SparseReducer(micro.Micro(), density=0.01)
    micro.attach(ddp_model, reducer)

A method is a composition: density x selector x exchange x feedback x codec.
"""

from micro.codecs import CODECS, Codec, Half, Raw
from micro.comm import Comm, GroupComm, SoloComm
from micro.ddp import Attachment, attach
from micro.density import Constant, WarmUp
from micro.exchanges.base import Exchange
from micro.exchanges.gather import Gather
from micro.exchanges.union import Union
from micro.feedback import FEEDBACKS, ErrorFeedback, Feedback, NoFeedback
from micro.flat import Layout
from micro.health import NonFiniteGradient
from micro.reducer import DenseReducer, Reducer, SparseReducer
from micro.selectors.base import Selector, all_selectors, build_selector
from micro.selectors.leader import Leader
from micro.selectors.micro import Micro
from micro.selectors.randomk import RandomK
from micro.selectors.threshold import Threshold
from micro.selectors.topk import TopK
from micro.simulate import SimulatedStep, Simulation
from micro.sparse import Exchanged, Overlap, Selection, SparseValues
from micro.stats import StepStats

EXCHANGES: dict[str, type[Exchange]] = {exchange.name: exchange for exchange in (Union, Gather)}

__all__ = [
    "CODECS",
    "EXCHANGES",
    "FEEDBACKS",
    "Attachment",
    "Codec",
    "Comm",
    "Constant",
    "DenseReducer",
    "ErrorFeedback",
    "Exchange",
    "Exchanged",
    "Feedback",
    "Gather",
    "GroupComm",
    "Half",
    "Layout",
    "Leader",
    "Micro",
    "NoFeedback",
    "NonFiniteGradient",
    "Overlap",
    "RandomK",
    "Raw",
    "Reducer",
    "Selection",
    "Selector",
    "SimulatedStep",
    "Simulation",
    "SoloComm",
    "SparseReducer",
    "SparseValues",
    "StepStats",
    "Threshold",
    "TopK",
    "Union",
    "WarmUp",
    "all_selectors",
    "attach",
    "build_selector",
]
