"""A config that cannot run here is refused at once, with all reasons together and what to change for each."""

import jax
import pytest
import tiny

from jaxscale.program.machine_check import check_machine
from jaxscale.program.memory import memory_lower_bound, memory_need
from jaxscale.system.exits import Exit, Stop

# 5e12 parameters: 80 TB of state, which no machine that runs tests has.
HUGE = {"model.num_layers": 1000, "model.embed_dim": 16384, "model.num_heads": 128, "model.head_dim": 128,
        "model.mlp_dim": 65536, "model.num_kv_heads": 128}  # fmt: skip


def refused(overrides):
    """(exit code, lines of the message)."""
    with pytest.raises(Stop) as stop:
        check_machine(tiny.config(overrides))
    return stop.value.code, str(stop.value).splitlines()


def test_what_can_run_is_let_through():
    check_machine(tiny.config())
    check_machine(tiny.config({"train_tokens": "3 epochs", "data.name": "synthetic"}))


def test_all_reasons_are_told_together_each_with_what_to_change():
    code, lines = refused(
        HUGE
        | {
            "mesh.tensor": 3,
            "model.matmul_precision": "tf32",
            "model.vocab_size": 264,
            "data.name": "files",
            "data.files": "nothing/*.txt",
        }
    )
    assert code is Exit.NO_GO == 3
    assert lines[0] == "4 reasons why this config cannot run here"
    kernel, data, mesh, memory = lines[1:]
    assert "kernel: model.matmul_precision='tf32' needs an NVIDIA GPU, but the platform is cpu; use 'default'" in kernel
    assert "data: " in data and "nothing/*.txt" in data
    assert "mesh={'fsdp': -1, 'tensor': 3} needs a multiple of 3 devices, but there are 8" in mesh
    assert "memory: " in memory and "TiB per device" in memory and "use more than" in memory


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"mesh.tensor": 3}, "needs a multiple of 3 devices, but there are 8"),
        ({"mesh.fsdp": 2}, "needs 2 devices, but there are 8"),
        ({"mesh.tensor": 4}, "kv_heads=2 is not a multiple of the 4 devices along mesh tensor"),
        ({"model.vocab_size": 65, "mesh.tensor": 2}, "vocab=65 is not a multiple of the 2 devices along mesh tensor"),
        ({"model.embed_dim": 20}, "embed=20 is not a multiple of the 8 devices along mesh fsdp"),
        ({"train.num_microbatches": 4}, "train.num_microbatches=4 leaves 4 sequences for 8 batch shards"),
        ({"batch_tokens": "4 rows"}, "leaves 4 sequences for 8 batch shards"),
        ({"model.matmul_precision": "tf32"}, "use 'default'"),
        ({"model.vocab_size": 264, "data.name": "files", "data.files": "nothing/*.txt"}, "nothing/*.txt"),
        ({"model.vocab_size": 264, "data.name": "files"}, "data.files"),
        ({"optim.groups": [{"pattern": "wqq"}]}, "optim.groups[0].pattern='wqq' matches no parameter"),
    ],
)  # fmt: skip
def test_one_reason_is_one_line(overrides, told):
    code, lines = refused(overrides)
    assert code is Exit.BAD_INPUT == 2
    assert lines[0] == "1 reason why this config cannot run here" and len(lines) == 2
    assert told in lines[1]


def test_a_model_that_is_too_large_says_how_much_is_missing():
    code, lines = refused(HUGE)
    assert code is Exit.NO_GO
    params = tiny.config(HUGE).model.num_params
    need = 16 * params / 8 / 2**40  # zero3 on 8 devices
    assert f"memory: the state needs {need:.1f} TiB per device" in lines[1]


@pytest.mark.slow
def test_the_state_is_counted_exactly():
    for overrides, shares in (({}, (8, 8, 8)), ({"rules": "zero1"}, (1, 8, 1))):
        program = tiny.program(overrides, 8)
        need = memory_need(program)
        size = lambda tree: sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
        state = program.init()
        assert (need.params, need.moments) == (size(state.params), size(state.opt_state))
        for nbytes, share in ((need.params, shares[0]), (need.moments / 2, shares[1]), (need.grads, shares[2])):
            assert nbytes == pytest.approx(4 * program.cfg.model.num_params / share, rel=0.1)
        assert need.total == need.params + need.moments + need.grads + need.activations > need.state


def test_the_least_memory_is_that_of_sharing_everything():
    program = tiny.program({}, 8)
    least = memory_lower_bound(program.cfg, 8)
    assert least.state <= memory_need(program).state
    assert least.state == pytest.approx(16 * program.cfg.model.num_params / 8, rel=0.1)


def test_more_microbatches_need_less_memory_for_activations():
    needs = [memory_need(tiny.program({"train.num_microbatches": parts})).activations for parts in (1, 4)]
    assert needs[0] > needs[1]


def test_activations_that_do_not_fit_are_told_with_their_own_way_out():
    code, lines = refused({"batch_tokens": f"{2**26} rows", "train.num_microbatches": 1})
    assert code is Exit.NO_GO and len(lines) == 2
    assert (
        "activations need about" in lines[1] and "train.num_microbatches" in lines[1] and "such devices" not in lines[1]
    )


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "TPU_WORKER_HOSTNAMES"])
def test_several_processes_are_refused_and_one_is_not(name, monkeypatch):
    monkeypatch.setenv(name, "one,two" if "TPU" in name else "2")
    code, lines = refused({})
    assert code is Exit.BAD_INPUT and lines[1].startswith("  1. hosts: ")
    monkeypatch.setenv(name, "one" if "TPU" in name else "1")
    check_machine(tiny.config())
