"""What the entry points share: from a checked configuration to a finished run folder, and from folders to figures."""
