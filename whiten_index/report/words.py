"""Text forms of figures."""

ABSENT = "–"


def signed(value: float, decimals: int) -> str:
    """Return a number with its sign, a real minus, and ± if it rounds to nothing."""
    text = f"{abs(value):.{decimals}f}"
    if not text.strip("0."):
        return f"±{text}"
    return f"{'+' if value > 0 else '−'}{text}"
