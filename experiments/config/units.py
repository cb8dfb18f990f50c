"""Format numbers with units."""


def human_bytes(count: float) -> str:
    """Write a number of bytes in decimal units: ``1.23 MB``."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def human_count(count: float) -> str:
    """Write a number in decimal units, as bits per second or parameters: ``75k``, ``11.2M``, ``10G``."""
    for unit in ("", "k", "M", "G"):
        if count < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{three_digits(count)}T"


def three_digits(number: float) -> str:
    """Return a number with three digits, and whole from a thousand on: 0.123, 12.3, 2061."""
    return f"{number:.3g}" if abs(number) < 999.5 else f"{number:.0f}"
