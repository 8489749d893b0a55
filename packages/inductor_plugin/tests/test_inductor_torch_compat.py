"""The private parts of torch that _torch_compat.py uses are where they were."""

import inspect

import pytest
import torch

from phalanx.inductor_plugin import _torch_compat


def test_inductor_takes_a_pass_with_a_uuid():
    assert hasattr(_torch_compat.inductor_config, _torch_compat.PASS_OPTION), (
        f"torch {torch.__version__} has no option {_torch_compat.PASS_OPTION} any more"
    )
    assert _torch_compat.CustomGraphPass.__abstractmethods__ == {"__call__", "uuid"}


def test_compile_fx_takes_an_inner_compiler_and_options():
    from torch._inductor.compile_fx import compile_fx

    names = set(inspect.signature(compile_fx).parameters)
    assert {"inner_compile", "config_patches"} <= names, f"compile_fx of torch {torch.__version__} has {names}"


def test_modes_have_options():
    assert _torch_compat.mode_options("default") == {}
    assert _torch_compat.mode_options("max-autotune-no-cudagraphs")
    with pytest.raises(RuntimeError, match="unknown mode 'nothing'; expected default"):
        _torch_compat.mode_options("nothing")


def test_what_inductor_makes_the_kernel_of():
    aten = torch.ops.aten
    for op in (aten.relu, aten.add.Tensor, aten.cat, aten.sum.dim_IntList):
        target = op if isinstance(op, torch._ops.OpOverload) else op.default
        assert _torch_compat.is_generated(target), f"Inductor of torch {torch.__version__} does not lower {target}"
    for target in (aten.mm.default, aten.convolution.default, torch.ops.phalanx.all_reduce.default):
        assert not _torch_compat.is_generated(target)


def test_sizes_have_hints():
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    assert _torch_compat.size_hint(7) == 7
    assert _torch_compat.size_hint(env.create_unbacked_symint()) is None


def test_names_of_groups():
    assert _torch_compat.group_name_of("0") == "0"
    assert _torch_compat.group_name_of(3) is None


def test_ops_may_be_said_to_have_effects():
    op = torch.ops.phalanx.symm_arena.default
    _torch_compat.keep_effect(op)
    _torch_compat.keep_effect(op)
    assert _torch_compat.with_effects().name() == "with_effects"


def test_ops_have_names_and_schemas():
    op = torch.ops.phalanx.all_reduce.default
    assert _torch_compat.op_name(op) == "all_reduce" and _torch_compat.op_name(len) == ""
    assert [argument.name for argument in _torch_compat.schema_of(op).arguments] == ["input", "reduce_op", "group_name"]
