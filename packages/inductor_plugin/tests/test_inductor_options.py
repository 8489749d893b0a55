"""The backend by name, its options, and that it leaves torch as it was."""

import importlib.metadata

import pytest
import torch
from torch._inductor import config as inductor_config

import phalanx.inductor_plugin as plugin
from phalanx.inductor_plugin._passes import GraphPass
from phalanx.inductor_plugin.config import Config, from_environment, split_options


def test_torch_finds_the_backend_by_its_name():
    entries = importlib.metadata.entry_points(group="torch_dynamo_backends", name="phalanx")
    if not entries:
        pytest.skip("phalanx-inductor-plugin is not installed: run from a source tree")
    assert "phalanx" in torch._dynamo.list_backends(exclude_tags=())
    assert torch._dynamo.lookup_backend("phalanx") is plugin.phalanx


def test_nothing_global_changes():  # I11
    before = inductor_config.get_config_copy()
    torch._dynamo.reset()
    x = torch.randn(4)
    torch.testing.assert_close(torch.compile(lambda x: x.relu() + 1, backend=plugin.phalanx)(x), x.relu() + 1)
    assert inductor_config.get_config_copy() == before
    assert inductor_config.post_grad_custom_post_pass is None


def test_a_process_without_groups_compiles_what_has_no_collectives():  # I9
    torch._dynamo.reset()
    plugin.clear_reports()
    x = torch.randn(4, requires_grad=True)
    torch.compile(lambda x: x.sin().sum(), backend=plugin.phalanx)(x).backward()
    torch.testing.assert_close(x.grad, x.detach().cos())
    assert plugin.reports() == []


class Counting:
    """A pass of the user."""

    calls = 0

    def __call__(self, graph):
        self.calls += 1


def test_a_pass_of_the_user_runs_too():
    torch._dynamo.reset()
    mine = Counting()
    options = {"post_grad_custom_post_pass": mine}
    torch.compile(lambda x: x.relu() + 2, backend=plugin.phalanx, options=options)(torch.randn(4))
    assert mine.calls == 1
    assert GraphPass(Config(), others=mine).uuid() is None  # it has none, so nothing may be cached


def test_options_are_told_apart_and_checked():
    config, theirs = split_options({"phalanx.strict": True, "phalanx.zero_copy_bytes": 1, "cpp_wrapper": True})
    assert (config.strict, config.zero_copy_bytes, theirs) == (True, 1, {"cpp_wrapper": True})
    for wrong, words in (
        ({"phalanx.nothing": 1}, "unknown option 'phalanx.nothing'"),
        ({"phalanx.strict": 1}, "must be True or False"),
        ({"phalanx.zero_copy_bytes": -1}, "must be an int of 0 or more"),
        ({"phalanx.zero_copy_bytes": True}, "must be an int of 0 or more"),
    ):
        with pytest.raises(ValueError, match=words):
            split_options(wrong)
    with pytest.raises(ValueError, match="unknown option"):
        plugin.options(nothing=1)
    torch._dynamo.reset()
    for kind, options, text in (
        (RuntimeError, {"nothing": 1}, "^backend 'phalanx': Inductor has no option 'nothing'"),
        (ValueError, {"phalanx.nothing": 1}, "^backend 'phalanx': unknown option 'phalanx.nothing'; expected one of"),
    ):
        with pytest.raises(kind, match=text) as caught:
            torch.compile(lambda x: x + 1, backend=plugin.phalanx, options=options)(torch.randn(2))
        assert type(caught.value).__name__ == kind.__name__  # and not BackendCompilerFailed


def test_the_environment_gives_other_defaults(monkeypatch):
    monkeypatch.setenv("PHALANX_COMPILE", "strict=1 zero_copy_bytes=4096")
    assert from_environment() == Config(strict=True, zero_copy_bytes=4096)
    for wrong, words in (
        ("strict", "write name=value"),
        ("nothing=1", "unknown option 'nothing'"),
        ("strict=perhaps", "must be 0, 1, true or false"),
        ("zero_copy_bytes=-1", "must be an integer that is not negative"),
    ):
        monkeypatch.setenv("PHALANX_COMPILE", wrong)
        with pytest.raises(ValueError, match=words):
            from_environment()


def test_a_mode_of_torch_compile_is_taken():
    torch._dynamo.reset()
    x = torch.randn(8, 8)
    compiled = torch.compile(lambda x: (x @ x).relu(), backend=plugin.phalanx, mode="max-autotune-no-cudagraphs")
    torch.testing.assert_close(compiled(x), (x @ x).relu())


def test_what_the_uuid_depends_on():
    from phalanx.inductor_plugin._eligibility import GroupFacts

    served = GraphPass(Config(), lambda *_: GroupFacts(True, 2))
    kept = GraphPass(Config(), lambda *_: GroupFacts(False, 0))
    assert served.uuid() == kept.uuid()  # nothing is known of any group yet
    for each in (served, kept):
        each.facts("0")
    assert served.uuid() != kept.uuid()
    assert GraphPass(Config(strict=True)).uuid() != GraphPass(Config()).uuid()
