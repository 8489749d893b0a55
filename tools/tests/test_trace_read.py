"""A dump is not trusted: whatever a file holds, phalanx trace says in one line what is wrong, or works."""

import copy
import json

import pytest
from flight_dumps import channel, dump, entry, failure, group, member, stuck
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.tools.trace import _chrome, _picture, _read
from phalanx.tools.trace._analysis import analyse, merge
from phalanx.tools.trace._text import report

ENTRY = ("groups", 0, "members", 1, "channels", 0, "entries", 1)
WHERE = "groups[0].members[1].channels[0].entries[1]"
RANK = f"a whole number from -1 to {(1 << 31) - 1}"
SEQUENCE, SIZE = (f"a whole number from {low} to {(1 << 64) - 1}" for low in (1, 0))
TIME = f"a whole number from 0 to {(1 << 63) - 1}"


def show(raw):
    """Everything that the command does with a file, except for writing."""
    dumps = [_read.parse(raw, "a file")]
    analyses = [analyse(group) for group in merge(dumps * 2)]
    return report(dumps, analyses, 3), _chrome.text(analyses), _picture.svg(_picture.draw(analyses, 3))


def refused(value):
    """Why an object, or the bytes of a file, is refused."""
    with pytest.raises(_read.DumpError) as caught:
        show(value if isinstance(value, bytes) else json.dumps(value).encode())
    text = str(caught.value)
    assert len(text.splitlines()) == 1 and len(text) < 400
    return text


def sound():
    error = failure("PHX_ERR_TIMEOUT", 3)
    return stuck() | {"groups": [stuck()["groups"][0] | {"state": "failed", "error": error}]}


def changed(place, value):
    """A sound dump with one value replaced."""
    made = sound()
    at = made
    for step in place[:-1]:
        at = at[step]
    at[place[-1]] = value
    return made


def places(value, place=()):
    """Every place in an object."""
    yield place
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*place, key))


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        (("format",), "chrome", "format is 'chrome'; expected 'phalanx-flight-recorder'"),
        (("version",), 2, "a dump of version 2; this phalanx reads version 1: use the phalanx that wrote it"),
        (("version",), 0, "version is 0; expected a whole number from 1 to 9223372036854775807"),
        (("version",), True, "version is true; expected a whole number from 1 to 9223372036854775807"),
        (("rank",), 4, "rank is 4; expected a whole number from 0 to 3"),
        (("host",), None, "host is null; expected a string"),
        (("dumped_ns",), 1e3, f"dumped_ns is 1000.0; expected {TIME}"),
        (("groups",), {}, "groups is an object; expected a list"),
        (("groups", 0), [], "groups[0] is a list; expected an object"),
        (("groups", 0, "members"), [], "groups[0].members is empty; expected at least one rank"),
        (("groups", 0, "state"), "odd", "groups[0].state is 'odd'; expected 'active' or 'failed'"),
        (("groups", 0, "error"), "bad", "groups[0].error is 'bad'; expected an object"),
        (("groups", 0, "error", "rank"), -2, f"groups[0].error.rank is -2; expected {RANK}"),
        (("groups", 0, "members", 1, "rank"), 0, "groups[0].members[1].rank 0 occurs twice"),
        ((*ENTRY, "sequence"), 1, f"{WHERE}.sequence is 1 after 1; expected the oldest first"),
        ((*ENTRY, "sequence"), 1 << 64, f"{WHERE}.sequence is {1 << 64}; expected {SEQUENCE}"),
        ((*ENTRY, "count"), 10**50, f"{WHERE}.count is {'1' + '0' * 36}...; expected {SIZE}"),
        ((*ENTRY, "count"), "x" * 99, f"{WHERE}.count is '{'x' * 36}...; expected {SIZE}"),
        ((*ENTRY, "end_ns"), 5, f"{WHERE}.end_ns is 5; expected a whole number from 5000100500 to 9223372036854775807"),
        ((*ENTRY, "end_ns"), None, f"{WHERE}.end_ns is null while status is 'ok'"),
        ((*ENTRY, "status"), "pending", f"{WHERE}.end_ns is a time while status is 'pending'"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(place, value, text):
    assert refused(changed(place, value)) == text


def test_every_field_of_the_format_is_needed():
    for place in places(sound()):
        if place and isinstance(place[-1], str):
            made = sound()
            at = made
            for step in place[:-1]:
                at = at[step]
            del at[place[-1]]
            assert refused(made).endswith(f"no field {place[-1]!r})"), place


def test_fields_that_nobody_knows_are_no_reason_to_refuse():
    made = sound()
    for place in list(places(made)):
        at = made
        for step in place:
            at = at[step]
        if isinstance(at, dict):
            at["new in 0.9"] = [{"x": float("nan")}]
    assert show(json.dumps(made).encode()) == show(json.dumps(sound()).encode())


def test_two_of_what_there_is_one_of_are_refused():
    assert "groups[1].id '0xtp' occurs twice" in refused(dump(group(member(0)), group(member(0))))
    twice = member(0, channel(entry(1, 5, 9)), channel(entry(1, 5, 9)))
    assert "channels[1].channel 0 occurs twice" in refused(dump(group(twice)))


def test_a_dump_that_was_cut_off_anywhere_is_refused():
    raw = json.dumps(sound()).encode()
    for length in range(0, len(raw), 7):
        assert "the file may be truncated" in refused(raw[:length])


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"\xff\xfe\x00", "not valid JSON (line 1, column 1: Expecting value)"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"version": ' + b"9" * 10_000 + b"}", "a number has thousands of digits"),
        (b"null", "the file is null; expected an object"),
        (b"[1]", "the file is a list; expected an object"),
    ],
)
def test_what_is_no_object_is_refused(raw, text):
    assert text in refused(raw)


def test_a_file_that_does_not_end_is_given_up(monkeypatch, tmp_path):
    monkeypatch.setattr(_read, "LARGEST_BYTES", 1 << 20)
    path = tmp_path / "large.json"
    path.write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(_read.DumpError, match=r"large\.json: larger than 1 MiB, which no dump is"):
        _read.read_file(path)


def test_a_text_that_was_cut_inside_a_letter_is_read():
    raw = json.dumps(sound(), ensure_ascii=False).encode().replace(b"a text", "é".encode()[:1])
    assert "\ufffd" in show(raw)[0]


# ---- arbitrary values -------------------------------------------------------------------------------------------

numbers = st.integers() | st.integers(-2, 70) | st.sampled_from([1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
values = st.recursive(
    st.none() | st.booleans() | numbers | st.floats() | st.text() | st.sampled_from(["ok", "pending", "failed", "$x$"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(values)
def test_arbitrary_json_is_refused_with_the_one_error(value):
    refused(value)


@settings(deadline=None)
@given(st.binary())
def test_arbitrary_bytes_are_refused_with_the_one_error(raw):
    refused(raw)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_dump_with_anything_in_some_places_is_shown_or_refused(data):
    made = sound()
    for place in data.draw(st.lists(st.sampled_from([each for each in places(made) if each]), min_size=1, max_size=3)):
        at = made
        try:
            for step in place[:-1]:
                at = at[step]
            at[place[-1]] = copy.deepcopy(data.draw(values))
        except (KeyError, IndexError, TypeError):
            continue  # replaced already
    try:
        texts = show(json.dumps(made).encode())
    except _read.DumpError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert all(line.isprintable() for text in texts for line in text.splitlines())
        json.loads(texts[1])
