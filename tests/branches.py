"""Collectives in the branches of a program: which wait for devices that may have taken another branch.

Values are followed through the program with the mesh axes along which they may differ. A branch that is chosen by such
a value must hold no collective over one of its axes, and no permutation at all, for which all devices of a mesh meet.
"""

from typing import Any, NamedTuple

from jax.extend.core import Literal

from jaxscale.core.shardings import mesh_axis_names

PERMUTES = "ppermute"
SAME = ("psum", "pmax", "pmin", "all_gather")  # what they return is the same on all devices of their axes
COLLECTIVES = (*SAME, PERMUTES, "all_to_all", "reduce_scatter", "psum_scatter", "pbroadcast")
Axes = frozenset[str]
ALIKE: Axes = frozenset()


class Waits(NamedTuple):
    """A collective that some devices may never come to."""

    name: str
    over: tuple[str, ...]
    branch: tuple[str, ...]  # the axes along which devices may choose another branch

    def __str__(self) -> str:
        return f"{self.name} over {self.over} in a branch that differs along {self.branch}"


def waiting(jaxpr: Any) -> list[Waits]:
    """What a traced program has of them. jaxpr: of what holds a jax.shard_map, whose arguments are global arrays."""
    found: list[Waits] = []
    follow(jaxpr, [ALIKE] * len(jaxpr.invars), ALIKE, found)
    return list(dict.fromkeys(found))


def follow(jaxpr: Any, differs: list[Axes], branch: Axes, found: list[Waits]) -> list[Axes]:
    """The axes along which the results differ, if the arguments do along these. branch: what chose to come here."""
    known = dict.fromkeys(jaxpr.constvars, ALIKE) | dict(zip(jaxpr.invars, differs, strict=True))
    of = lambda atom: ALIKE if isinstance(atom, Literal) else known[atom]
    for eqn in jaxpr.eqns:
        results = results_of(eqn, [of(atom) for atom in eqn.invars], branch, found)
        known.update(zip(eqn.outvars, results, strict=True))
    return [of(atom) for atom in jaxpr.outvars]


def results_of(eqn: Any, differs: list[Axes], branch: Axes, found: list[Waits]) -> list[Axes]:
    """The axes along which the results of one operation differ."""
    name, params = eqn.primitive.name, eqn.params
    joined = ALIKE.union(*differs)
    if name == "shard_map":
        cut = [frozenset(axis for place in spec for axis in mesh_axis_names(place)) for spec in params["in_specs"]]
        follow(params["jaxpr"], cut, branch, found)
        return [ALIKE] * len(eqn.outvars)
    if name == "axis_index":
        return [frozenset(mesh_axis_names(params["axis_name"]))]
    if name in COLLECTIVES:
        axes = frozenset(mesh_axis_names(params.get("axis_name", params.get("axes"))))
        if branch and (name == PERMUTES or branch & axes):
            found.append(Waits(name, tuple(sorted(axes)), tuple(sorted(branch))))
        same = name in SAME and params.get("axis_index_groups") is None
        return [joined - axes if same else joined | axes] * len(eqn.outvars)
    if name == "cond":
        chosen, *operands = differs
        branches = [follow(one.jaxpr, operands, branch | chosen, found) for one in params["branches"]]
        return [chosen.union(*results) for results in zip(*branches, strict=True)]
    if name == "scan":
        return results_of_scan(params, differs, branch, found)
    if name == "while":
        return results_of_while(params, differs, branch, found)
    inner = [params[key] for key in ("jaxpr", "call_jaxpr") if key in params]
    if inner:
        return follow(getattr(inner[0], "jaxpr", inner[0]), differs, branch, found)
    return [joined] * len(eqn.outvars)


def results_of_scan(params: Any, differs: list[Axes], branch: Axes, found: list[Waits]) -> list[Axes]:
    """The same of a scan: what is carried may come to differ in any turn."""
    consts, carried = params["num_consts"], params["num_carry"]
    while True:
        results = follow(params["jaxpr"].jaxpr, differs, branch, found)
        before = differs[consts : consts + carried]
        after = [one | other for one, other in zip(before, results)]
        if after == before:
            return results
        differs = [*differs[:consts], *after, *differs[consts + carried :]]


def results_of_while(params: Any, differs: list[Axes], branch: Axes, found: list[Waits]) -> list[Axes]:
    """The same of a loop, which itself is a branch: devices may leave it at different turns."""
    ask, run = params["cond_nconsts"], params["body_nconsts"]
    asked, own, carry = differs[:ask], differs[ask : ask + run], differs[ask + run :]
    while True:
        (on,) = follow(params["cond_jaxpr"].jaxpr, [*asked, *carry], branch, found)
        results = follow(params["body_jaxpr"].jaxpr, [*own, *carry], branch | on, found)
        after = [one | other | on for one, other in zip(carry, results, strict=True)]
        if after == carry:
            return carry
        carry = after
