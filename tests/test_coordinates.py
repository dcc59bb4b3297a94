"""Under muP no change of an activation grows with the width; without it most do."""

import pytest
import tiny

from jaxscale.system.exits import BadInput
from jaxscale.tools.lab.coordinates import KINDS, SCORES, Coordinate, at_width, coordinate_check, slopes

BASE = dict(embed_dim=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=128)
EXPERTS = dict(number=4, chosen=2, mlp_dim=64, shared_dim=32)
GROWING = KINDS[1:]  # without muP; not the embeddings, of which each step's updates are as large at every width


def config(*, mup=None, optimizer="adamw", rate=1e-2, **model):
    named = {f"model.{name}": value for name, value in (BASE | model | dict(mup=mup)).items()}
    return tiny.config(named | {"batch_tokens": "4 rows", "optim.peak_lr": rate, "optim.name": optimizer})


def flat(table, step, but=()):
    found = slopes(table, step)
    assert max(abs(slope) for kind, slope in found.items() if kind not in but) < 0.25, found


@pytest.mark.soak
def test_under_mup_changes_are_as_large_at_every_width_and_without_they_grow():
    """The narrowest is the base, where both are the same model."""
    table = coordinate_check(config(mup=dict(base_dim=64)), (64, 1024), steps=2)
    flat(table, 1)
    flat(table, 2)
    standard = [row for row in table if row.width == 64] + coordinate_check(config(), (1024,), steps=2)
    found = slopes(standard, 2)
    assert min(found[kind] for kind in GROWING) > 0.5, found


@pytest.mark.soak
def test_with_larger_heads_only_scores_of_random_queries_shrink():
    table = coordinate_check(config(mup=dict(base_dim=64, base_head_dim=16)), (64, 256, 1024))
    flat(table, 3, but=(SCORES,))
    assert -0.5 < slopes(table, 3)[SCORES] < 0


@pytest.mark.soak
@pytest.mark.parametrize(
    "settings",
    [
        dict(optimizer="sgd", rate=1.0),
        dict(optimizer="lion", rate=2e-3),
        dict(experts=EXPERTS),
        dict(qk_norm=True, norm_placement="both"),
    ],
    ids=["sgd", "lion", "experts", "norms"],
)
def test_under_mup_they_are_as_large_with_other_optimizers_and_shapes(settings):
    flat(coordinate_check(config(mup=dict(base_dim=64), **settings), (64, 256, 1024), seeds=(0, 1)), 3)


def test_a_slope_is_the_power_of_the_width():
    table = [
        Coordinate(kind, width, 1, size=3.0 * width**0.5, change=width**power)
        for kind, power in zip(KINDS, (0, 1, -0.5, 0.25, 2, 0))
        for width in (64, 128, 1024)
    ]
    assert list(slopes(table, 1).values()) == pytest.approx([0, 1, -0.5, 0.25, 2, 0], abs=1e-9)
    assert list(slopes(table, 1, of="size").values()) == pytest.approx([0.5] * 6)


def test_all_that_grows_with_the_width_grows():
    wide = at_width(config(experts=EXPERTS, mup=dict(base_dim=64)), 256).model
    assert (wide.embed_dim, wide.num_heads, wide.num_kv_heads, wide.head_dim, wide.mlp_dim) == (256, 16, 8, 16, 512)
    assert (wide.experts.mlp_dim, wide.experts.shared_dim, wide.experts.number) == (256, 128, 4)
    heads = at_width(config(mup=dict(base_dim=64, base_head_dim=16)), 256).model
    assert (heads.num_heads, heads.head_dim, heads.mlp_dim) == (4, 64, 512)
    with pytest.raises(
        BadInput, match=r"width=80: model.num_kv_heads=2 at embed_dim=64 would become 2.5, which is not an"
    ):
        at_width(config(), 80)
    with pytest.raises(BadInput, match="model.name='gpt2': the coordinate check supports only model.name='llama'"):
        at_width(tiny.config({"model": tiny.GPT2}), 32)
