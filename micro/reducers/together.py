"""Which parts of a sparse method go together."""

from typing import Any

from micro.density.base import Constant, Density
from micro.exchanges.base import Exchange, Needs, Wire
from micro.feedback.base import Feedback
from micro.reducers.quantized import check_codec
from micro.selectors.base import Selector, Traits
from micro.values.sparse import Overlap


def check_together(
    selector: Selector[Any], density: Density[Any], exchange: Exchange[Any], wire: Wire, feedback: Feedback
) -> None:
    """Raise ValueError where the parts of a method do not go together, with the reason."""
    overlap = selector.overlap
    if overlap not in exchange.accepts:
        why = _WHY_NOT[overlap].format(selector.full_name)
        raise ValueError(f"exchange {exchange.full_name} {why}: use exchange union")
    exchange.check_wire(wire)
    if Traits.EVERY_INDEX in selector.traits and density != Constant(1.0):
        raise ValueError(f"selector {selector.name} sends all values: set density=1, without a warm-up")
    if Traits.UNBIASED in selector.traits and feedback.name != "none":
        raise ValueError("unbiased random-k scales its values, which error feedback would amplify: set feedback=none")
    needs, is_coded = exchange.needs, not wire.values.lossless
    has_others = Needs.NO_MOMENTUM in needs or (Needs.NO_MOMENTUM_WITH_CODES in needs and is_coded)
    if feedback.name == "momentum" and has_others:
        raise ValueError(
            f"feedback momentum clears it where a rank sends something, and what exchange {exchange.label} sends has "
            "entries that the rank did not choose: use exchange union or gather"
        )
    check_codec(wire.values, feedback)
    if density.by_layer and Traits.BY_PARAMETER not in selector.traits:
        raise ValueError(
            f"density {density.name} differs by layer, {selector.name} does not: use topk, scope=layer, or per_tensor"
        )
    if overlap is not Overlap.SAME:
        wire.indices.check_density(density.density)


_WHY_NOT = {
    Overlap.LEADER: "sends each rank's own choice, but with {} one rank chooses for all",
    Overlap.SAME: "sends each rank's own choice, but {} gives all ranks the same indices",
    Overlap.ANY: "needs index sets that no two ranks share, but with {} they may share some",
    Overlap.DISJOINT: "needs ranks that search the whole vector, but with {} each searches its own slice",
}
