"""What several tools use: named methods, sources of gradients, times of selection."""
