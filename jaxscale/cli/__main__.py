"""`python -m jaxscale.cli VERB ...`: the command `jaxscale` if it is not on PATH."""

from jaxscale.cli import main

main()
