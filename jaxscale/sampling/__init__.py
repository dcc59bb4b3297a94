"""Text from a model."""

from jaxscale.callable_room import make_callable

make_callable(__name__)  # jaxscale.sample(...) is jaxscale.api.sample
