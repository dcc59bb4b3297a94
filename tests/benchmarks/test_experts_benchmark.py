"""benchmarks/experts.py: a mixture layer compared with a dense one. Nothing here asserts a speed."""

import contextlib
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import experts
from jaxscale.kernels.matmul.slots import project_expert

ragged_dot = jax.lax.ragged_dot
TINY = [
    "--config.seq_len=32", "--config.batch_tokens=64 rows", "--config.model.num_layers=1",
    "--config.model.vocab_size=32", "--config.model.embed_dim=16", "--config.model.num_heads=2", "--rounds=2",
    "--config.model.num_kv_heads=2", "--config.model.head_dim=8", "--config.model.mlp_dim=16",
    "--config.model.experts.mlp_dim=16", "--config.model.experts.shared_dim=16",
]  # fmt: skip


@pytest.mark.soak
def test_layers_are_timed_beside_a_dense_one_of_what_a_token_goes_through(monkeypatch):
    seen = []
    monkeypatch.setattr(experts.lax, "ragged_dot", lambda *given: seen.append(given) or ragged_dot(*given))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert experts.main([*TINY, "--json"]) == 0
    record = json.loads(printed.getvalue())
    assert len(seen) == 3, "gate, up and down, of the layer that is named so alone"
    assert record["dense_dim"] == 2 * 16 + 16 and record["tokens"] == 64 * 32 and record["spec"] == "M"
    named = {layer["name"]: layer for layer in record["layers"]}
    assert list(named) == [experts.EVEN, experts.UNEVEN, experts.RAGGED]
    assert named[experts.UNEVEN]["busiest"] == pytest.approx(1.4, abs=0.07)
    assert named[experts.EVEN]["busiest"] == named[experts.RAGGED]["busiest"]
    for layer in record["layers"]:
        low, high = layer["ratio_quartiles"]
        assert 0 < low <= layer["ratio"] <= high and layer["seconds"] > 0 < layer["dense_seconds"]
    lines = experts.experts_lines(record)
    assert "a layer of 8 experts of 16, 2 for each of 2,048 tokens" in lines[0] and "48 wide" in lines[0]
    assert [line.split("  ")[1] for line in lines[2:5]] == list(named)
    assert [layer["turns"] for layer in record["layers"]] == [2, 2, 1]


def test_a_model_without_experts_is_refused():
    with pytest.raises(ValueError, match="S has no experts; pass --spec=M, or --config=FILE with a mixture"):
        experts.main(["--spec=S"])


def test_jaxs_ragged_dot_is_what_is_timed_as_such():
    keys, counts = jax.random.split(jax.random.key(0)), [3, 0, 5]
    x_RC, w_ECO = jax.random.normal(keys[0], (8, 4)), jax.random.normal(keys[1], (3, 4, 6))
    right = jnp.concatenate([project_expert(x_RC[:3], w_ECO[0]), project_expert(x_RC[3:], w_ECO[2])])
    np.testing.assert_allclose(experts.ragged_project(x_RC, w_ECO, jnp.asarray(counts)), right, rtol=1e-5)


def test_a_pass_gives_the_result_the_gradients_of_what_goes_in_and_those_of_each_weight():
    mlp = nnx.Linear(3, 2, use_bias=False, rngs=nnx.Rngs(0))
    x_BTD, dy_BTD = jnp.arange(12.0).reshape(2, 2, 3), jnp.ones((2, 2, 2))
    run = experts.pass_of(mlp, lambda mlp, x_BTD: (mlp(x_BTD), 7), dy_BTD)
    y_BTD, (params, dx_BTD), told = run(x_BTD)
    np.testing.assert_allclose(y_BTD, mlp(x_BTD), rtol=1e-6)
    np.testing.assert_allclose(dx_BTD, dy_BTD @ mlp.kernel[...].T, rtol=1e-6)
    np.testing.assert_allclose(params.kernel[...], jnp.einsum("BTD,BTO->DO", x_BTD, dy_BTD), rtol=1e-6)
    assert told == 7
