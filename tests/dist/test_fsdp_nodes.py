"""attach_fsdp() on three nodes of one rank: they share the processes of other tests, four ranks are of their own."""

import pytest

from tests.dist.fsdp_steps import MICRO, check_books
from tests.dist.on_ranks import on_ranks

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]


@on_ranks(3)
def test_nothing_is_lost_of_an_odd_number_of_nodes() -> None:
    check_books(MICRO, num_nodes=3)
