"""Our GPT-2 computes what transformers computes."""

import numpy as np
import pytest

from jaxscale.ops.attention import AttentionNeeds
from jaxscale.ops.kernels import PLAIN, choose_kernels

# float32 sums taken in another order: measured 4e-6 on logits of size 1 to 4, 4e-7 on gradients of size 1e-3 to 0.3.
TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 2e-6
FORMS = {
    "scanned": (True, PLAIN),
    "unrolled": (False, PLAIN),
    "cpu": (True, choose_kernels("cpu", "auto", AttentionNeeds(head_dim=1, dtype="float32"))),
}


@pytest.mark.parametrize("form", FORMS)
def test_logits_loss_and_gradients_are_those_of_transformers(form, parity):
    reference, (scan_layers, kernels) = parity.load("gpt2"), FORMS[form]
    cfg = parity.gpt2_config(reference.config, scan_layers=scan_layers)
    params = parity.gpt2_params(cfg, reference.weights)
    ours = parity.compute(cfg, params, parity.make_batch(reference["tokens"]), kernels=kernels)
    np.testing.assert_allclose(ours.logits, reference["logits"], rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_allclose(ours.total, reference["loss"], rtol=1e-6)
    parity.assert_close_trees(ours.gradients, parity.gpt2_params(cfg, reference.gradients), GRADIENT_TOLERANCE)
