"""Muon against an SVD and its published code, and the same on every mesh."""

import functools
import os
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from stacks import RATE, draw, losses, on_mesh, trained

from jaxscale.core.optim import muon
from jaxscale.core.optim.config import OptimConfig
from jaxscale.core.optim.muon import PUBLISHED, newton_schulz, polar, scaled_polar

MATRICES = ("wq", "wo", "gate", "up", "experts")


@functools.cache
def on_one(**settings):
    return trained(on_mesh({}), name="muon", **settings)[0]


def iterated(s):
    for a, b, c in PUBLISHED:
        s = a * s + b * s**3 + c * s**5
    return s


@pytest.mark.cases(1)
@pytest.mark.parametrize("shape", [(3, 12, 20), (2, 20, 12), (1, 16, 16)])
def test_the_singular_vectors_stay_and_the_singular_values_are_iterated(shape):
    x = np.random.default_rng(0).normal(size=shape)
    u, s, v = np.linalg.svd(x, full_matrices=False)
    wanted = (u * iterated(s / np.linalg.norm(s, axis=1, keepdims=True))[:, None]) @ v
    found = np.asarray(polar(jnp.asarray(x, jnp.float32), newton_schulz))
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    exact = polar(
        jnp.asarray(x, jnp.float32), lambda x: newton_schulz(x, [(15 / 8, -10 / 8, 3 / 8)] * 40)
    )  # the quintic that converges
    np.testing.assert_allclose(exact, u @ v, atol=2e-5)


def published(x, steps=5):
    """zeropower_via_newtonschulz5 of github.com/KellerJordan/Muon, in float64."""
    a, b, c = PUBLISHED[0]
    x = x.T if (tall := x.shape[0] > x.shape[1]) else x
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


AS_MATRICES = {"wq": (8, 24), "wo": (24, 8), "gate": (8, 16), "up": (8, 16), "experts": (16, 8)}


@pytest.mark.slow
def test_updates_of_matrices_are_those_of_the_published_code_and_all_others_adamw_s():
    params, momentum = draw(0), jax.tree.map(np.zeros_like, draw(0))
    for number in range(3):
        grads = draw(1 + number, 0.1)
        for name in MATRICES:
            grad, moved = grads["blocks"][name], momentum["blocks"][name]
            moved[:] = 0.95 * moved + grad
            flat = (grad + 0.95 * moved).astype(np.float64).reshape(-1, *AS_MATRICES[name])
            new = 0.2 * max(flat.shape[1:]) ** 0.5 * np.stack([published(x) for x in flat])
            params["blocks"][name] -= (RATE * (new.reshape(grad.shape) + 0.1 * params["blocks"][name])).astype("f4")
    found = on_one()
    for name in MATRICES:
        np.testing.assert_allclose(found["blocks"][name], params["blocks"][name], atol=1e-5)
    own = draw(0)
    own = {"router": own["blocks"]["router"], "norm": own["blocks"]["norm"], "embedding": own["embedding"]}
    decays = {"router": True, "norm": False, "embedding": False}
    adamw = optax.adamw(RATE, 0.9, 0.95, 1e-8, weight_decay=0.1, mask=decays)
    state = adamw.init(own)
    for number in range(3):
        grads = draw(1 + number, 0.1)
        updates, state = adamw.update({n: (grads["blocks"] | grads)[n] for n in own}, state, own)
        own = optax.apply_updates(own, updates)
    for name, value in own.items():
        np.testing.assert_allclose((found["blocks"] | found)[name], value, atol=1e-6)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("shape", "rules", "heads"),
    [
        (dict(fsdp=8), "zero3", "fused"),  # 3 layers for 8 devices: gate and up together, and zeros
        (dict(data=2, fsdp=2, tensor=2), "zero1", "fused"),
        (dict(fsdp=2, tensor=2, expert=2), "zero2", "each"),
        pytest.param(dict(data=8), "zero3", "fused", marks=pytest.mark.soak),
    ],
)
def test_on_a_mesh_whole_matrices_are_orthogonalised(shape, rules, heads):
    found, program = trained(on_mesh(shape), rules, name="muon", muon_heads=heads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), found, on_one(muon_heads=heads))
    if shape == dict(fsdp=8):  # nobody has all matrices
        assert "all-to-all" in program and "all-gather" not in program


@pytest.mark.slow
def test_few_steps_give_the_same_on_a_mesh():
    found, _ = trained(on_mesh(dict(fsdp=4, tensor=2)), "zero3", name="muon", muon_steps=3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), found, on_one(muon_steps=3))


@pytest.mark.slow
def test_heads_by_themselves_are_other_matrices():
    fused, each = on_one()["blocks"], on_one(muon_heads="each")["blocks"]
    assert np.abs(fused["wq"] - each["wq"]).max() > 1e-3
    np.testing.assert_array_equal(fused["gate"], each["gate"])


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(2, 16, 16), (2, 16, 48), (2, 48, 16)])
@pytest.mark.parametrize(("steps", "least", "farthest"), [(2, 0.03, 0.39), (3, 0.01, 0.28), (4, 0.003, 0.21)])
def test_few_steps_with_optimal_coefficients_bring_singular_values_near_to_one(steps, least, farthest, shape, dtype):
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape)
    u, _, v = np.linalg.svd(x, full_matrices=False)
    s = np.geomspace(least, 1, u.shape[-1]) if dtype == "float32" else np.linspace(0.2, 1, u.shape[-1])
    bound = (s**4).sum() ** 0.25  # sqrt(|X X'|), of which the iteration takes the shares
    s = np.maximum(s, 1.01 * least * bound)
    found = np.asarray(scaled_polar(jnp.asarray((u * s) @ v, dtype), steps), np.float64) / (0.2 * max(shape[1:]) ** 0.5)
    if dtype == "float32":  # bfloat16 rounds the matrix itself to one with other singular vectors
        inner = u.swapaxes(1, 2) @ found @ v.swapaxes(1, 2)
        np.testing.assert_allclose(inner, inner * np.eye(u.shape[-1]), atol=1e-3)
    values = np.linalg.svd(found, compute_uv=False)
    rounding = 0 if dtype == "float32" else {2: 0.04, 3: 0.04, 4: 0.35}[steps]  # it adds up from step to step
    assert 1 - farthest - rounding < values.min() and values.max() < 1 + farthest + rounding
    assert not np.any(np.asarray(scaled_polar(jnp.zeros(shape, dtype), steps)))


@pytest.mark.slow
def test_products_of_gram_matrices_give_what_products_of_the_matrix_do(monkeypatch):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, 16, 64)), jnp.float32)
    on_gram = scaled_polar(x, 3)
    monkeypatch.setattr(muon, "GRAM_RATIO", 100)
    direct = scaled_polar(x, 3)
    assert np.any(on_gram != direct)
    np.testing.assert_allclose(on_gram, direct, atol=1e-5)


MESHES = [
    {"mesh.fsdp": 2, "mesh.data": 2, "mesh.tensor": 2, "rules": "zero1"},
    {"mesh.fsdp": 8},
    {"mesh.fsdp": 4, "mesh.tensor": 2, "rules": "zero2"},
    {"mesh.pipeline": 2, "mesh.fsdp": 2, "mesh.context": 2, "train.num_microbatches": 4, "model.remat": "full"},
    {"mesh.fsdp": 8, "model.scan_layers": False},
]


@pytest.mark.soak  # the update alone is, above
@pytest.mark.parametrize("overrides", MESHES)
def test_a_run_is_the_same_on_every_mesh(overrides):
    settings = {"optim.name": "muon"}
    one = losses(settings | {"mesh.fsdp": 1}, 1)
    np.testing.assert_allclose(losses(settings | overrides, 8), one, rtol=1e-5)
    assert one[-1] < one[0]


def test_moments_in_the_host_s_memory_are_refused():
    with pytest.raises(ValueError, match="offload_moments does not support name='muon', which needs whole tensors"):
        OptimConfig(name="muon", offload_moments=True)


THEIRS = """
import numpy, sys, torch
torch.Tensor.bfloat16 = torch.Tensor.float  # its iteration, in float32
start, *grads = numpy.load(sys.argv[1])
param = torch.nn.Parameter(torch.from_numpy(start))
muon = torch.optim.Muon([param], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
for grad in grads:
    param.grad = torch.from_numpy(grad)
    muon.step()
numpy.save(sys.argv[1], param.detach().numpy())
"""


@pytest.mark.peer
def test_updates_are_those_of_torch(tmp_path):
    if not (python := os.environ.get("JAXSCALE_TORCH_PYTHON", "")):
        pytest.skip("set JAXSCALE_TORCH_PYTHON to a Python that has torch 2.9 or later")
    arrays = np.stack([draw(0)["blocks"]["gate"][1], *[draw(1 + n, 0.1)["blocks"]["gate"][1] for n in range(3)]])
    np.save(tmp_path / "gate.npy", arrays)
    subprocess.run([python, "-c", THEIRS, str(tmp_path / "gate.npy")], check=True)
    np.testing.assert_allclose(on_one()["blocks"]["gate"][1], np.load(tmp_path / "gate.npy"), atol=1e-5)
