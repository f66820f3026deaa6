"""The names of counted methods that are not those of engines or presets."""


def equalised(engine: str) -> str:
    """Rounding as presets with a volume do it: gradients are divided by the equaliser's scales before."""
    return f"{engine}, equalised"
