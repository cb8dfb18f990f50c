"""HOW the ranks' indices and values become one update: one file per exchange."""
