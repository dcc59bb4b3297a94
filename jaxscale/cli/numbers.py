"""Numbers on the command line of a verb."""


def whole_number(name: str, text: str, least: int) -> int:
    """The value of --name as a number. Raises ValueError if it is none, or too small."""
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise ValueError(f"--{name}={text} must be a whole number, {least} or more")
    return int(text)
