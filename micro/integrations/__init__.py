"""Callbacks for Lightning and transformers; import them by module, since micro itself imports no framework."""
