"""Our Llama computes what transformers computes, in all its forms; test_families.py has its relatives."""

import numpy as np
import pytest

from jaxscale.core.plan import UNSHARDED, single_device_plan
from jaxscale.kernels.config import AttentionNeeds

# float32 sums taken in another order: measured 4e-6 on logits of size 1 to 4, 4e-7 on gradients of size 1e-3 to 0.3.
TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 2e-6
FORMS = {
    "scanned": ({}, UNSHARDED),
    "unrolled": ({"scan_layers": False}, UNSHARDED),
    "recomputed": ({"remat": "full"}, UNSHARDED),
    "cpu": ({"loss_chunk_tokens": 16}, single_device_plan("cpu", "auto", AttentionNeeds(head_dim=1, dtype="float32"))),
}


@pytest.mark.parametrize(
    "form", ["scanned", "cpu", *[pytest.param(form, marks=pytest.mark.soak) for form in ("unrolled", "recomputed")]]
)
def test_logits_loss_and_gradients_are_those_of_transformers(form, parity):
    reference, (changes, plan) = parity.load("llama"), FORMS[form]
    cfg = parity.config(reference.config, **changes)
    params = parity.params(cfg, reference.weights)
    ours = parity.compute(cfg, params, parity.make_batch(reference["tokens"]), plan=plan)
    np.testing.assert_allclose(ours.logits, reference["logits"], rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_allclose(ours.total, reference["loss"], rtol=1e-6)
    parity.assert_close_trees(ours.gradients, parity.params(cfg, reference.gradients), GRADIENT_TOLERANCE)


def test_packed_documents_are_read_as_transformers_reads_each_alone(parity):
    reference = parity.load("llama")
    cfg = parity.config(reference.config)
    batch = parity.make_batch(reference["tokens"])._replace(
        positions=reference["packed_positions"], segment_ids=reference["packed_segment_ids"]
    )
    ours = parity.compute(cfg, parity.params(cfg, reference.weights), batch)
    np.testing.assert_allclose(ours.logits, reference["packed_logits"], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    "chunk_tokens", [pytest.param(4096, id="whole", marks=pytest.mark.soak), pytest.param(16, id="chunked")]
)
def test_soft_cap_and_z_loss_are_what_torch_makes_of_them(chunk_tokens, parity):
    reference, start = parity.load("llama_capped"), parity.load("llama")
    cap, z_loss = reference.config["logit_soft_cap"], reference.config["z_loss"]
    cfg = parity.config(reference.config, logit_softcap=cap, loss_chunk_tokens=chunk_tokens)
    params, batch = parity.params(cfg, start.weights), parity.make_batch(start["tokens"])
    ours = parity.compute(cfg, params, batch, aux_weights={"z_loss": z_loss})
    np.testing.assert_allclose(ours.logits, reference["logits"], rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_allclose(ours.parts["loss"], reference["loss"], rtol=1e-6)
    np.testing.assert_allclose(ours.total, reference["loss"] + reference["z_term"], rtol=1e-6)
    parity.assert_close_trees(ours.gradients, parity.params(cfg, reference.gradients), GRADIENT_TOLERANCE)
