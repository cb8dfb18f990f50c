"""DeMo: coefficients of tiles, with its transform and without."""

import micro
from micro.zoo.dct import DCTReducer
from tests.sparsifiers.base import BUILD_UP, Make, Row, lists, raw_lists, rows


def tiles(**settings: object) -> Make:
    """Return a maker of the reducer with small tiles, so that the laws' matrices have whole ones and edges."""
    return lambda density, seed: DCTReducer(density=density, size=4, seed=seed, **settings)  # type: ignore[arg-type]


def row(name: str, make: Make, **promises: object) -> Row:
    """Return a row; all of them send the same."""
    return Row(
        name=name,
        make=make,
        band=BUILD_UP,
        counts=rows(8),
        indices=lists(4),
        values=raw_lists,
        num_collectives=3,
        spectral=True,
        mixes=True,
        **promises,  # type: ignore[arg-type]
    )


ROWS: tuple[Row, ...] = (
    row("dct", tiles()),
    row("dct+none", tiles(transform="none")),
    row("dct+senders", tiles(exchange=micro.Gather(rule="senders")), conserves_mass=False, rule="senders"),
)
