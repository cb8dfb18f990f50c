"""Numbers with their units, for people."""


def human_bytes(count: float) -> str:
    """Write a number of bytes in decimal units: ``1.23 MB``."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
