"""What an exchange is: HOW the ranks' indices and values become one update."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Flag, auto
from typing import TYPE_CHECKING, ClassVar, TypeVar

from torch import Tensor

from micro.codecs.base import Codec, Key
from micro.codecs.indices import IndexCodec, Int32
from micro.codecs.raw import Raw
from micro.comm.ranks import Comm
from micro.comm.requests import Reduction
from micro.parts import NoState, StatefulPart
from micro.predicted_traffic import Calls
from micro.values.sparse import Exchanged, Overlap, Selection, Step

if TYPE_CHECKING:
    from micro.exchanges.predicted_traffic import Choice

__all__ = ["Exchange", "Needs", "NoState", "Transport", "Wire"]

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Wire:
    """The forms in which values and indices travel."""

    values: Codec = field(default_factory=Raw)
    indices: IndexCodec = field(default_factory=Int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """How the ranks send each other what they chose in one step.

    Attributes:
        comm: the ranks, all of which make the same requests in the same order.
        step: the same on all ranks, but for whether this rank's gradient was finite. That is sent along.
        overlap: how the ranks' index sets relate.
        wire: the forms of values and indices.
    """

    comm: Comm
    step: Step
    overlap: Overlap
    wire: Wire

    @property
    def key(self) -> Key:
        """What seeds the randomness of this rank's encoding."""
        return self.step.seed, self.step.index, self.comm.rank


class Needs(Flag):
    """What an exchange needs of the composition that it is in."""

    NOTHING = 0
    RAW_VALUES = auto()  # it sends values as they are: no codec goes with it but `Raw`
    INT32_INDICES = auto()
    NO_MOMENTUM = auto()  # what a rank sends has entries that the rank did not choose, which keep their momentum
    NO_MOMENTUM_WITH_CODES = auto()  # the same, where a codec rounds


class Exchange(StatefulPart[S], ABC):
    """A way in which the ranks' selections become one mean update, equal bit for bit on all ranks.

    A subclass says in ``accepts`` which relations of index sets it takes, and in ``needs`` what else it depends on.
    """

    kind: ClassVar[str] = "exchange"
    home: ClassVar[str] = "micro.exchanges"
    group: ClassVar[str] = "micro.exchanges"
    accepts: ClassVar[frozenset[Overlap]]
    needs: ClassVar[Needs] = Needs.NOTHING

    @property
    def label(self) -> str:
        """The name, and the rule where there are several: for errors."""
        return f"{self.name} (rule {self.rule_name})" if self.rule_name else self.name

    def check_wire(self, wire: Wire) -> None:
        """Raise ValueError where values or indices cannot travel in this form."""
        if Needs.RAW_VALUES in self.needs and not wire.values.lossless:
            raise ValueError(f"exchange {self.label} sends values as they are, got codec {wire.values.name}: use raw")
        if Needs.INT32_INDICES in self.needs and not isinstance(wire.indices, Int32):
            raise ValueError(
                f"exchange {self.label} has a form of indices of its own, got {wire.indices.name}: use int32"
            )

    @abstractmethod
    def exchange(self, state: S, acc: Tensor, selection: Selection, transport: Transport) -> Reduction[Exchanged]:
        """Yield what is requested of all ranks; return the mean update and what this rank contributed to it.

        Args:
            state: this exchange's own state; may be changed.
            acc: (numel,) gradient + residual. Not modified.
            selection: what this rank chose.
        """

    def volume(self, choice: "Choice") -> tuple[Calls, float]:
        """Return the collectives that ``exchange`` calls for this choice, in turn, and the indices in the update.

        Raises:
            ValueError: the exchange does not say.
        """
        raise ValueError(f"what exchange {self.name} sends is not known: give it a method volume")
