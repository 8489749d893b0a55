"""The rules by brute force against one process: a sample of what `phalanx verify` sweeps."""

import importlib.util
import json

import pytest
import torch

from phalanx.dtensor.placement_types import Partial, Replicate, Shard
from phalanx.tools.verify import check_call
from phalanx.tools.verify.samples import samples
from phalanx.tools.verify.simulate import Mismatch, coordinates, cut, put_together
from phalanx.tools.verify.sweep import Calls, Report, check_calls, sweep

aten = torch.ops.aten


def test_every_rule_is_right_on_the_samples():
    calls = Calls()
    for op, args, kwargs in samples():
        calls.see(op, args, kwargs)
    found, left = check_calls(calls.found, meshes=((2,), (3,), (4,)), deadline_s=600)
    assert left == 0
    assert [text for one in found.values() for text in one.failures] == []
    # Every op was tried, and with something cut or Partial.
    assert {str(op) for op, _ in calls.found} == set(found)
    assert [op for op, one in found.items() if not one.cut] == []


WRONG = [
    # (op, args, kwargs, a wrong rule): what each lacks or claims too much
    (aten.mean.dim, (torch.rand(5, 3), [0]), {}, "a b -> b ; a:sum"),
    (aten.add.Tensor, (torch.rand(4), 1.0), {}, "... -> ... ; lin 0"),
    (aten.mul.Tensor, (torch.rand(4), torch.rand(4)), {}, "..., ... -> ... ; lin 0+1"),
    (aten.exp.default, (torch.rand(4),), {}, "... -> ... ; lin 0"),
    (aten.neg.default, (torch.rand(4),), {}, "... -> ... ; up 0"),
    (aten.sqrt.default, (torch.rand(4),), {}, "... -> ... ; up 0"),
    (aten._softmax.default, (torch.rand(4, 6), 1, False), {}, "a b -> a b"),
    (aten.cumsum.default, (torch.rand(6), 0), {}, "a -> a"),
    (aten.view.default, (torch.rand(4, 6), [24]), {}, "a b -> (a b) ; pass 0"),
    (aten.t.default, (torch.rand(4, 6),), {}, "a b -> a b"),
    (aten.amax.default, (torch.rand(4, 6), [0]), {}, "a b -> b ; a:sum"),
    (aten.addmm.default, (torch.rand(3), torch.rand(4, 6), torch.rand(6, 3)), {}, "n, m k, k n -> m n ; k:sum"),
    (aten.mse_loss_backward.default, (torch.rand(()), torch.rand(6), torch.rand(6), 1), {}, ", a, a -> a"),
]


@pytest.mark.parametrize(("op", "args", "kwargs", "text"), WRONG, ids=[str(one[0]) for one in WRONG])
def test_a_wrong_rule_is_noticed(op, args, kwargs, text):
    assert check_call(op, args, kwargs).wrong == 0
    outcome = check_call(op, args, kwargs, text=text)
    assert outcome.wrong > 0
    assert str(op) in outcome.failures[0]


@pytest.mark.parametrize("mesh", [(3,), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8, torch.bool])
def test_what_is_cut_is_put_together_again(mesh, dtype):
    random = torch.Generator().manual_seed(1)
    whole = torch.randint(0, 5, (5, 3), generator=random).to(dtype)
    kinds = [Shard(0), Shard(1), Replicate(), Partial("max"), Partial("min"), Partial("product")]
    for placement in kinds + ([] if dtype == torch.bool else [Partial("sum")]):
        pieces = cut(whole, [placement] * len(mesh), mesh, random)
        assert list(pieces) == list(coordinates(mesh))
        together = put_together(pieces, [placement] * len(mesh), mesh, whole.shape)
        assert torch.allclose(together.double(), whole.double())
        if placement.is_partial() and dtype != torch.bool:
            assert any(not torch.equal(piece, whole) for piece in pieces.values())


def test_replicas_that_differ_and_parts_of_the_wrong_size_are_noticed():
    pieces = {(0,): torch.zeros(2), (1,): torch.ones(2)}
    with pytest.raises(Mismatch, match="a replica differs in 2 of 2 elements"):
        put_together(pieces, [Replicate()], [2], torch.Size([2]))
    with pytest.raises(Mismatch, match=r"rank \(0,\) has shape \[2\], not \[3\]"):
        put_together(pieces, [Shard(0)], [2], torch.Size([5]))


def test_an_error_of_a_rule_does_not_pass_for_a_sample_that_torch_refuses(monkeypatch):
    calls = Calls()
    calls.refuse(RuntimeError("of torch\nand more"))
    assert calls.refused == ["RuntimeError: of torch"]
    monkeypatch.setattr("phalanx.tools.verify.sweep.bound", lambda *_: [][0])  # a mistake of ours
    with pytest.raises(IndexError):
        calls.see(aten.neg.default, (torch.ones(2),), {})
    with pytest.raises(IndexError):
        calls.refuse(RuntimeError("of torch"))


ENTRIES = """
add where clamp sum mean amax any prod linalg.vector_norm mm addmm baddbmm nn.functional.linear reshape permute squeeze
expand cat split gather scatter_add index_add nn.functional.embedding softmax nn.functional.layer_norm
nn.functional.mse_loss tril cumsum
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("expecttest") is None, reason="torch's OpInfo database needs expecttest")
def test_rules_are_right_on_what_opinfo_samples_call_and_the_sweep_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "sweep.json"
    lines = []
    sweep(Report(path), ENTRIES.split(), sample_count=1, show=lines.append)
    report = Report(path)
    assert not report.left
    totals = report.by_op()
    assert [text for one in totals.values() for text in one.failures] == []
    assert {"aten.native_layer_norm_backward.default", "aten.addmm.default", "aten.view.default"} <= set(totals)
    # A variant (softmax.with_dtype) runs with its entry.
    swept = {entry.split()[0] for entry in json.loads(path.read_text())["entries"]}
    assert set(ENTRIES.split()) <= swept
    again = []
    sweep(report, ENTRIES.split(), sample_count=1, show=again.append)
    assert len(lines) > len(ENTRIES.split()) and again == []
