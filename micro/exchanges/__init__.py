"""Exchanges: combine the ranks' selected indices and values into one update, one file per exchange."""
