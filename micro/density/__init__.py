"""HOW MUCH: the density of each step, one file per policy."""
