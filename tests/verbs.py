"""What a person sees of a verb that works, and is told by one that does not."""

import pytest


def printed(verb, capsys, *argv):
    """(stdout, stderr) of a command that works."""
    assert verb.main(list(argv)) == 0
    return capsys.readouterr()


def told(verb, *argv):
    """The line that a person is told."""
    with pytest.raises(ValueError) as caught:
        verb.main(list(argv))
    assert "\n" not in str(caught.value)
    return str(caught.value)
