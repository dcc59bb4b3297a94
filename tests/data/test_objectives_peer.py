"""Rows for an encoder and its decoder are those that seqio packs. TensorFlow lives in its own environment:

python -m venv E && E/bin/pip install seqio
JAXSCALE_SEQIO_PYTHON=E/bin/python pytest -m peer tests/data
"""

import json
import os
import subprocess

import numpy as np
import pytest

from jaxscale.core.batch import Batch
from jaxscale.runtime.data.objective_config import SpanCorruptionConfig
from jaxscale.runtime.data.objectives import apply_objective
from jaxscale.runtime.data.objectives.ids import find_ids
from jaxscale.runtime.data.stacking import stack_rows

PYTHON = os.environ.get("JAXSCALE_SEQIO_PYTHON", "")
PACK = """
import json, sys
import seqio, tensorflow as tf
rows = []
for row in json.load(open(sys.argv[1])):
    kind = {name: tf.TensorSpec([None], tf.int32) for name in ("inputs", "targets")}
    documents = tf.data.Dataset.from_generator(lambda: iter(row["documents"]), output_signature=kind)
    packed = seqio.EncDecFeatureConverter(pack=True)(documents, task_feature_lengths=row["lengths"])
    rows.append([{name: values.tolist() for name, values in one.items()} for one in packed.as_numpy_iterator()])
json.dump(rows, open(sys.argv[2], "w"))
"""
OURS = {
    "encoder_input_tokens": lambda batch: batch.encoder.tokens,
    "encoder_positions": lambda batch: batch.encoder.positions,
    "encoder_segment_ids": lambda batch: batch.encoder.segment_ids,
    "decoder_input_tokens": lambda batch: batch.tokens,
    "decoder_target_tokens": lambda batch: batch.targets,
    "decoder_positions": lambda batch: batch.positions,
    "decoder_segment_ids": lambda batch: batch.segment_ids,
    "decoder_loss_weights": lambda batch: batch.weights,
}

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(not PYTHON, reason="JAXSCALE_SEQIO_PYTHON names no Python with seqio"),
]


def row_of(lengths, seq_len, seed):
    segments = np.zeros(seq_len, np.int32)
    segments[: sum(lengths)] = np.repeat(np.arange(len(lengths)) + 1, lengths)
    tokens = np.where(segments > 0, np.random.default_rng(seed).integers(2, 256, seq_len), 0).astype(np.int32)
    return Batch(tokens, tokens, tokens, segments, (segments > 0).astype(np.float32))


def test_a_row_of_inputs_and_targets_is_the_one_that_seqio_packs(tmp_path):
    cfg = SpanCorruptionConfig(first_sentinel_id=300, start_id=0, end_id=1)
    batch = stack_rows([row_of([120], 120, 0), row_of([50, 30, 40], 120, 1), row_of([9, 60], 120, 2)])
    made = apply_objective(cfg, find_ids(cfg, None, None, 400, 120), batch, 0, range(3), 0)
    rows = []
    for row in range(3):
        documents = []
        for number in range(1, made.segment_ids[row].max() + 1):
            inputs = made.encoder.tokens[row][made.encoder.segment_ids[row] == number].tolist()
            documents.append(dict(inputs=inputs, targets=made.targets[row][made.segment_ids[row] == number].tolist()))
        lengths = dict(inputs=made.encoder.tokens.shape[1], targets=made.targets.shape[1])
        rows.append(dict(documents=documents, lengths=lengths))
    asked, told = tmp_path / "documents.json", tmp_path / "packed.json"
    asked.write_text(json.dumps(rows))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([PYTHON, "-c", PACK, asked, told], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for row, packed in enumerate(json.loads(told.read_text())):
        assert len(packed) == 1  # what we laid side by side in one row fits in one of theirs
        for name, ours in OURS.items():
            np.testing.assert_array_equal(ours(made)[row], packed[0][name], err_msg=name)
