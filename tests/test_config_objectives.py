"""An objective and a model that do not go together are refused before anything is read."""

import pytest
import tiny

from jaxscale.build import make_program
from jaxscale.program.budget import resolve_budget
from jaxscale.program.memory import memory_need
from jaxscale.runtime.data.objective_config import MaskedLmConfig, NextTokenConfig

SPANS = dict(name="span_corruption")
ONE_ROW = dict(name="span_corruption", layout="one_row")


def config(model, objective, **more):
    return tiny.config({"model": model, "data.objective": objective, **more})


@pytest.mark.parametrize(
    ("model", "objective", "told"),
    [
        (tiny.LLAMA, dict(name="masked_lm"), "'masked_lm' cannot train model.name='llama'; use model.name='encoder'"),
        (tiny.T5, dict(name="masked_lm"), "cannot train model.name='t5'"),
        (tiny.ENCODER, dict(name="next_token"), "use a decoder: llama or gpt2"),
        (tiny.T5, dict(name="prefix_lm"), "use a decoder: llama or gpt2"),
        (tiny.GPT2, SPANS, "use model.name='t5', or data.objective.layout='one_row' with a decoder"),
        (tiny.T5, ONE_ROW, "or data.objective.layout='encoder_decoder' with model.name='t5'"),
        (tiny.LLAMA | dict(attention_window=4), dict(name="prefix_lm"), "model.attention_window=4 limits attention"),
        (tiny.GPT2 | dict(max_seq_len=18), ONE_ROW, "sequences of 20 tokens, is longer than model.max_seq_len=18"),
    ],
)
def test_what_does_not_go_together_is_told_with_the_way_out(model, objective, told):
    with pytest.raises(ValueError) as error:
        config(model, objective)
    assert told in str(error.value)


def test_rows_that_the_tensor_axis_does_not_divide_name_the_setting():
    cfg = config(tiny.T5, SPANS, **{"mesh.tensor": 2, "mesh.fsdp": -1, "seq_len": 20, "batch_tokens": 320})
    with pytest.raises(ValueError, match=r"sequences of 5 and 19 tokens.*data.objective.multiple_of=2"):
        make_program(cfg, resolve_budget(cfg, None))


@pytest.mark.parametrize(
    ("model", "objective"), [(tiny.ENCODER, dict(name="masked_lm")), (tiny.T5, SPANS), (tiny.LLAMA, ONE_ROW)]
)
def test_a_kernel_that_cannot_read_ahead_is_refused_and_auto_takes_xla(model, objective):
    cfg = config(model | dict(attention="blockwise"), objective)
    with pytest.raises(ValueError, match="blockwise does not support"):
        make_program(cfg, resolve_budget(cfg, None))
    cfg = config(model | dict(attention="auto"), objective)
    program = make_program(cfg, resolve_budget(cfg, None))
    assert program.plan.attention.name == "xla" and "blockwise" in program.plan.attention.reason
    assert memory_need(program).activations > 0 and cfg.flops_per_token > 0


def test_an_objective_has_a_name_and_next_token_is_the_default():
    assert config(tiny.LLAMA, {}).data.objective == NextTokenConfig()
    cfg = config(tiny.ENCODER, dict(name="masked_lm", rate="0.3"))
    assert cfg.data.objective == MaskedLmConfig(rate=0.3)
    with pytest.raises(ValueError, match="did you mean 'masked_lm'"):
        config(tiny.ENCODER, dict(name="mask_lm"))
