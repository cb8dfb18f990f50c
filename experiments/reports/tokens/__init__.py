"""Pages and figures of studies whose runs see equally many tokens: what is exchanged, how often, by how many."""

from experiments.reports.tokens.pages import PAGES, write_page
from experiments.reports.tokens.points import joined, points, read

__all__ = ["PAGES", "joined", "points", "read", "write_page"]
