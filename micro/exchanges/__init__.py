"""HOW indices and values meet: one file per exchange."""
