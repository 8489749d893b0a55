"""The language of sharding rules: what a text says, and where a malformed one is wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.dtensor._rules.parser import BATCH, Pass, Reduction, RuleError, TensorDims, parse


def dims(*names):
    return TensorDims(tuple((one,) if isinstance(one, str) else one for one in names))


def test_a_matmul_ties_dims_reduces_one_factor_and_is_linear_in_each_input_alone():
    rule = parse("m k, k n -> m n ; k:sum ; lin 0|1")
    assert rule.inputs == (dims("m", "k"), dims("k", "n"))
    assert rule.outputs == (dims("m", "n"),)
    assert rule.reductions == (Reduction("k", "sum"),)
    assert rule.passes == (Pass("lin", (0,)), Pass("lin", (1,)))


def test_groups_ones_whole_factors_and_batch_dims_are_read():
    rule = parse("... (a b!) 1, x! -> ... a b 1 ; size 1=0 ; count 3=a ; scale ... a ; full a")
    assert rule.inputs == (dims(BATCH, ("a", "b"), ()), dims("x"))
    assert rule.outputs == (dims(BATCH, "a", "b", ()),)
    assert rule.whole == {"b", "x"}
    assert rule.size_args == ((1, 0),)
    assert rule.count_args == ((3, "a"),)
    assert rule.scaled == {BATCH, "a"}
    assert rule.full == {"a"}


def test_tensors_may_have_no_dims_or_be_whole_whatever_their_rank():
    rule = parse("k, , *, ? -> , * ; k:max ; up 1")
    assert rule.inputs == (dims("k"), dims(), TensorDims(None), TensorDims(None, unread=True))
    assert rule.outputs == (dims(), TensorDims(None))
    assert rule.reductions == (Reduction("k", "max"),)


def test_a_reduction_may_ask_another_input_to_be_partial_too():
    rule = parse("n, m k, k n -> m n ; k:sum+0 ; lin 0+1|0+2")
    assert rule.reductions == (Reduction("k", "sum", (0,)),)
    assert rule.passes == (Pass("lin", (0, 1)), Pass("lin", (0, 2)))


def test_the_same_text_is_read_once():
    assert parse("a b -> b a ; pass 0") is parse("a b -> b a ; pass 0")


MALFORMED = [
    ("m k, k n", 9, "lacks '->'"),
    ("a -> b -> c", 8, "has a second '->'"),
    ("a b -> a # b", 10, "an unexpected character"),
    ("a B -> a", 3, "an unexpected character"),
    ("a a -> a", 3, "factor 'a' twice"),
    ("... ... -> ...", 5, "the batch dims twice"),
    ("(a b -> a b", 6, "does not close"),
    ("(a ...) -> a", 4, "batch dims inside a group"),
    ("() a -> a", 2, "an empty group"),
    ("a 2 -> a", 3, "lacks a factor"),
    ("a * -> a", 3, "lacks a factor"),
    ("* a -> a", 3, "dims together with '*'"),
    ("a -> a ; b:sum", 10, "clause on 'b'"),
    ("a b -> a ; b:avg", 14, "reduces by unknown reduce op 'avg'"),
    ("a b -> a ; a:sum", 12, "every output has it"),
    ("a b! -> a ; b:sum", 13, "must be whole"),
    ("a b -> a ; b:sum ; b:max", 20, "reduces 'b' twice"),
    ("a b -> a ; b:max+0", 18, "joins an input to a reduction by max"),
    ("a b -> a ; b:sum+0", 12, "that input has 'b'"),
    ("a -> a ; lin 1", 14, "names an input 1, but there are 1"),
    ("a -> a ; lin", 13, "lacks the number of an input"),
    ("a, a -> a ; lin 0+0", 20, "an input twice"),
    ("a -> a ; lin 0 1", 16, "has '1' where a clause must end"),
    ("a -> a ; fly 0", 10, "begins with 'fly'"),
    ("a -> a ; ", 9, "begins with ''"),
    ("a -> a ; size", 14, "lacks the number of an argument"),
    ("a -> a ; size 1=1", 17, "names an output 1"),
    ("a -> a ; count 1", 17, "lacks '='"),
    ("a -> a ; scale b", 16, "clause on 'b'"),
    ("a -> ?", 3, "has '?' as output 0"),
    ("? a -> a", 3, "dims together with '?'"),
    ("a -> ... a", 3, "batch dims in output 0 but in no input"),
]


@pytest.mark.parametrize(("text", "column", "what"), MALFORMED)
def test_a_malformed_rule_is_refused_with_the_column(text, column, what):
    with pytest.raises(RuleError) as refused:
        parse(text)
    message = str(refused.value)
    assert what in message
    assert f"at column {column}:" in message
    # The caret stands under that column of the text.
    assert message.splitlines()[-1].index("^") == column - 1 + 2


@given(st.text(alphabet="ab .()!*?,->;:+|=01linsum", max_size=40))
def test_any_text_is_read_or_refused_as_a_rule(text):
    try:
        rule = parse(text)
    except RuleError:
        return
    assert rule.text == text
