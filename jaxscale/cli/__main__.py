"""Runs `python -m jaxscale.cli VERB ...`, which is equivalent to the command `jaxscale`."""

from jaxscale.cli import main

main()
