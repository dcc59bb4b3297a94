"""Counts the instructions that XLA:TPU schedules for splash attention with blocks of each size; no chip is needed.

    python docs/attention_blocks.py v5p:2x2x1 v6e:2x2                  # topologies; 4,096 positions
    python docs/attention_blocks.py v5e:2x2 --positions=2048

The table of jaxscale/kernels/attention/splash.py is its outcome. A row is a size of blocks, (queries, keys); its
figures are bundles of instructions, in thousands, that one causal head takes in each kernel: what is done for each
block that is visited, for each place of the grid, and for each first and last block of a row. Waiting for memory is in
none.
"""

import argparse
import glob
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence

SIZES = (512, 1024, 2048)
KERNELS = ("fwd", "dkv", "dq")
HEAD_DIM = 128
FAST_MEMORY_KIB = 32 * 1024  # kernels/compiler_options.py; what v6e has unasked
BUNDLE = re.compile(r"\s*0x([0-9a-f]+)\s+(LB|LH|LE|PB|PF)?")


def main(arguments: Sequence[str]) -> None:
    """Prints a table for each topology."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topologies", nargs="+", metavar="TOPOLOGY")
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--blocks", help=argparse.SUPPRESS)  # compiles one size: its own process, for libtpu's dump
    flags = parser.parse_args(arguments)
    if flags.blocks:
        compile_kernels(flags.topologies[0], flags.positions, *map(int, flags.blocks.split(",")))
        return
    for topology in flags.topologies:
        print(f"{topology}, {flags.positions} positions: {', '.join(KERNELS)}")
        sizes = [size for size in SIZES if size <= flags.positions]
        for queries, keys in itertools.product(sizes, sizes):
            counts = [f"{count / 1e3:.1f}" for count in count_bundles(topology, flags.positions, queries, keys)]
            print(f"  ({queries}, {keys})  {'  '.join(counts) or 'does not fit'}", flush=True)


def count_bundles(topology: str, positions: int, queries: int, keys: int) -> list[int]:
    """Bundles of each kernel for one head; [] where the blocks do not fit."""
    with tempfile.TemporaryDirectory() as folder:
        dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        command = [sys.executable, __file__, topology, f"--positions={positions}", f"--blocks={queries},{keys}"]
        how = dict(env={**os.environ, "LIBTPU_INIT_ARGS": dump}, capture_output=True, text=True)
        if (done := subprocess.run(command, **how)).returncode:
            if "RESOURCE_EXHAUSTED" not in done.stderr:
                sys.exit(done.stderr.strip().splitlines()[-1])
            return []
        found = []
        rows, columns = positions // queries, positions // keys
        visited = sum(-(-(row + 1) * queries // keys) for row in range(rows))
        for kernel in KERNELS:
            names = glob.glob(f"{folder}/*splash_mha_{kernel}*-final_bundles.txt")
            loop, block, edges = read_schedule(next(name for name in names if "analysis" not in name))
            ends = columns if kernel == "dkv" else rows
            found.append(visited * block + rows * columns * (loop - block - edges) + ends * edges)
        return found


def read_schedule(file: str) -> tuple[int, int, int]:
    """(bundles of the kernel's loop, of the part for a visited block, of the two next longest parts) of its schedule.

    A part is what a branch may leave out: from the branch to the label behind it.
    """
    with open(file) as lines:
        bundles = [(match, line) for line in lines if (match := BUNDLE.match(line))]
    begin = next(number for number, (match, _) in enumerate(bundles) if match[2] == "LB")
    inside = [(int(match[1], 16), match[2], line) for match, line in bundles[begin:] if ": >" in line[:14]]
    parts, start = [], None
    for address, label, line in inside:
        if start is not None and label == "PF":
            parts.append(address - start)
            start = None
        if start is None and "sbr.rel (" in line:
            start = address
    parts.sort(reverse=True)
    return inside[-1][0] - inside[0][0] + 1, parts[0], sum(parts[1:3])


def compile_kernels(topology: str, positions: int, queries: int, keys: int) -> None:
    """Compiles attention and its gradients for two heads with these blocks."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel_lib
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as mask_lib

    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    of_q = dict.fromkeys(("block_q", "block_q_dkv", "block_q_dq"), queries)
    of_kv = ("block_kv", "block_kv_compute", "block_kv_dkv", "block_kv_dkv_compute", "block_kv_dq")
    mask = mask_lib.MultiHeadMask([mask_lib.CausalMask((positions, positions))] * 2)
    sizes = kernel_lib.BlockSizes(**of_q, **dict.fromkeys(of_kv, keys))
    kernel = kernel_lib.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)

    def gradients(q_BNTH, k_BNTH, v_BNTH, ids_BT, dout_BNTH):  # row by row, as the model has it
        attend = jax.vmap(lambda q, k, v, ids: kernel(q, k, v, kernel_lib.SegmentIds(ids, ids)))
        return jax.vjp(lambda *qkv: attend(*qkv, ids_BT), q_BNTH, k_BNTH, v_BNTH)[1](dout_BNTH)

    place = jax.sharding.SingleDeviceSharding(device)
    heads = jax.ShapeDtypeStruct((1, 2, positions, HEAD_DIM), jnp.bfloat16, sharding=place)
    ids_BT = jax.ShapeDtypeStruct((1, positions), jnp.int32, sharding=place)
    options = {"xla_tpu_scoped_vmem_limit_kib": FAST_MEMORY_KIB}
    jax.jit(gradients, compiler_options=options).lower(heads, heads, heads, ids_BT, heads).compile()


if __name__ == "__main__":
    main(sys.argv[1:])
