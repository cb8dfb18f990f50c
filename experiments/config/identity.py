"""Keys of a configuration that say where or how often, but not what: runs that differ in these alone are one run."""

NEUTRAL = frozenset(
    {
        *("output", "dataset.root", "cluster.rdzv_endpoint", "cluster.max_restarts", "cluster.slurm"),
        "cluster.num_threads",
        *("checkpoint", "save_weights", "tracking", "measure_residual_every"),
        "scale",  # which has chosen its values by then
    }
)


def is_neutral(key: str) -> bool:
    """Return whether a dotted key is one of these, or lies below one."""
    parts = key.split(".")
    return any(".".join(parts[:length]) in NEUTRAL for length in range(1, len(parts) + 1))
