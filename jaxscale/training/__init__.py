"""The training step and the loop around it."""

from jaxscale.callable_room import make_callable

make_callable(__name__)  # jaxscale.train(...) is jaxscale.api.train
