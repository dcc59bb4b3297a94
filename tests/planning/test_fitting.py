"""Where a mesh does not divide a model or its batch, one that was made is named."""

import re

import jax
import pytest
import tiny

from jaxscale.build import make_program
from jaxscale.program.budget import resolve_budget
from jaxscale.program.fitting_mesh import UNCOUNTED, fitting_program
from jaxscale.system.exits import BadInput


@pytest.mark.parametrize(
    ("devices", "changes", "named"),
    [
        (6, {}, "--config.mesh.data=3 --config.batch_tokens=288 (changes the batch from 16 to 18 sequences)"),
        (7, {}, "--config.mesh.data=7 --config.batch_tokens=224 (changes the batch from 16 to 14 sequences)"),
        (8, {"batch_tokens": "4 rows"}, "--config.mesh.tensor=2"),
        (8, {"train.num_microbatches": 4}, "--config.train.num_microbatches=2"),
    ],
)
def test_the_mesh_that_is_named_was_made(devices, changes, named):
    cfg, devices = tiny.config(changes), jax.devices()[:devices]
    with pytest.raises(BadInput, match=f"; settings that work on these {len(devices)} devices: {re.escape(named)}$"):
        fitting_program(cfg, devices)
    values = dict(pair.split("=") for pair in re.findall(r"--config\.(\S+)", named))
    wanted = tiny.config(changes | {name: int(value) for name, value in values.items()})
    assert make_program(wanted, resolve_budget(wanted, epoch_tokens=UNCOUNTED), devices).mesh.size == len(devices)


def test_what_no_mesh_can_mend_is_told_as_it_is():
    with pytest.raises(BadInput) as error:
        fitting_program(tiny.config({"compiler": {"xla_no_such_option": True}}), jax.devices())
    assert "this works" not in str(error.value)


def test_what_fits_is_made():
    assert fitting_program(tiny.config(), jax.devices()).mesh.shape["fsdp"] == 8
