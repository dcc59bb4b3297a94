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

from jaxscale.optim.config import OptimConfig
from jaxscale.optim.muon import COEFFICIENTS, polar

MATRICES = ("wq", "wo", "gate", "up", "experts")


@functools.cache
def on_one(**settings):
    return trained(on_mesh({}), name="muon", **settings)[0]


def iterated(s, steps=5):
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return s


@pytest.mark.parametrize("shape", [(3, 12, 20), (2, 20, 12), (1, 16, 16)])
def test_the_singular_vectors_stay_and_the_singular_values_are_iterated(shape):
    x = np.random.default_rng(0).normal(size=shape)
    u, s, v = np.linalg.svd(x, full_matrices=False)
    wanted = (u * iterated(s / np.linalg.norm(s, axis=1, keepdims=True))[:, None]) @ v
    found = np.asarray(polar(jnp.asarray(x, jnp.float32)))
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    exact = polar(jnp.asarray(x, jnp.float32), (15 / 8, -10 / 8, 3 / 8), 40)  # the quintic that converges
    np.testing.assert_allclose(exact, u @ v, atol=2e-5)


def published(x, steps=5):
    """zeropower_via_newtonschulz5 of github.com/KellerJordan/Muon, in float64."""
    a, b, c = COEFFICIENTS
    x = x.T if (tall := x.shape[0] > x.shape[1]) else x
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


AS_MATRICES = {"wq": (8, 24), "wo": (24, 8), "gate": (8, 16), "up": (8, 16), "experts": (16, 8)}


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


def test_heads_by_themselves_are_other_matrices():
    fused, each = on_one()["blocks"], on_one(muon_heads="each")["blocks"]
    assert np.abs(fused["wq"] - each["wq"]).max() > 1e-3
    np.testing.assert_array_equal(fused["gate"], each["gate"])


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
    muon = {"optim.name": "muon"}
    one = losses(muon | {"mesh.fsdp": 1}, 1)
    np.testing.assert_allclose(losses(muon | overrides, 8), one, rtol=1e-5)
    assert one[-1] < one[0]


def test_moments_in_the_host_s_memory_are_refused():
    with pytest.raises(ValueError, match="offload_moments=true: name='muon' needs whole tensors"):
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
