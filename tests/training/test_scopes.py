"""A profile and a dump of the compiled step say which part of the work is which."""

import re

import jax
import pytest
import tiny
from twins import twins

from jaxscale.build import make_program
from jaxscale.program.budget import resolve_budget

SCOPES = "embedding attention mlp gather_weights loss reduce_gradients optimizer guard".split()
MODELS = {
    "llama": {},
    "gpt2": {"model": tiny.GPT2},
    "encoder": {"model": tiny.ENCODER, "data.objective": dict(name="masked_lm", mask_id=63)},
    "t5": {"model": tiny.T5, "data.objective": dict(name="span_corruption", first_sentinel_id=40, num_sentinels=20)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", twins([*MODELS], "llama", "encoder"))
def test_the_operations_of_a_step_say_which_part_they_belong_to(name):
    cfg = tiny.config(MODELS[name] | {"train.num_microbatches": 2})
    program = make_program(cfg, resolve_budget(cfg, None), jax.devices()[:2])
    text = program.train_step.lower(program.abstract_state, program.abstract_batch).as_text(debug_info=True)
    names = re.findall(r'loc\("([\w/().]+)"', text)  # an argument's name has brackets, a file's is a path from the root
    scopes = {part for name in names if not name.startswith("/") for part in re.findall(r"\w+", name)}
    assert not set(SCOPES) - scopes
    assert "transpose(jvp(embedding))/" in text, "the backward pass has the names of the forward pass"
