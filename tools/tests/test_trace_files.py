"""The files that phalanx trace writes: trace events, and the picture."""

import json
import random
import xml.etree.ElementTree
from itertools import pairwise

import pytest
from flight_dumps import SECOND, channel, dump, entry, failure, group, member, stuck, write

from phalanx.tools.trace import _chrome, _picture, main
from phalanx.tools.trace._analysis import analyse, merge
from phalanx.tools.trace._read import DumpError, parse

SVG = "{http://www.w3.org/2000/svg}"


def analyses_of(*dumps):
    return [analyse(each) for each in merge([parse(json.dumps(one).encode(), "x") for one in dumps])]


def crowd(seed, ranks=3):
    """Collectives of several groups and channels, many in flight, some failed, the last ones pending."""
    draw = random.Random(seed)
    groups = []
    for name in ("tp", "dp"):
        channels = {rank: [] for rank in range(ranks)}
        for number in (0, 2):
            for rank in range(ranks):
                now, entries = draw.randrange(1, 10**10), []
                for sequence in range(1, draw.randrange(6, 20)):
                    now += draw.choice((1, 333, 10_007, 1_000_003))
                    end = now + draw.choice((0, 1, 999, 50_001, 3_000_001))
                    entries.append(entry(sequence, now, end, status=draw.choice(("ok", "ok", "PHX_ERR_TIMEOUT"))))
                entries.append(entry(entries[-1]["sequence"] + 1, now + 5))
                channels[rank].append(channel(*entries, number=number))
        groups.append(group(*(member(rank, *channels[rank]) for rank in range(ranks)), name=name))
    return dump(*groups, dumped_ns=10**11)


def slices(events):
    """Complete events by thread, with times in whole nanoseconds as Perfetto reads them."""
    found = {}
    for event in events:
        if event["ph"] == "X":
            start, duration = int(event["ts"] * 1000), int(event["dur"] * 1000)
            found.setdefault((event["pid"], event["tid"]), []).append((start, start + duration, event))
    return found


# ---- trace events -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_events_have_what_the_format_asks_for_and_nest(seed):
    written = json.loads(_chrome.text(analyses_of(crowd(seed))))
    events = written["traceEvents"]
    names = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each["name"] == "thread_name"}
    processes = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert processes == {rank: f"rank {rank} (pid {4121 + rank})" for rank in range(3)}
    for event in events:
        assert isinstance(event["name"], str) and event["ph"] in ("X", "M", "i") and isinstance(event["args"], dict)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0 and (event["pid"], event["tid"]) in names
        elif event["ph"] == "i":
            assert event["s"] == "p" and event["ts"] >= 0 and event["name"] == "PHX_ERR_TIMEOUT"
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0
    for track in slices(events).values():
        ends = []  # of the events around
        for start, end, event in track:
            while ends and ends[-1] <= start:
                ends.pop()
            assert len(ends) == (0 if event["cat"] == "collective" else 1)
            assert all(end <= outer for outer in ends)
            ends.append(end)


def test_the_parts_of_a_collective_are_waiting_and_the_rest():
    members = [member(0, channel(entry(1, 1_001, 5_000))), member(1, channel(entry(1, 3_007, 4_500)))]
    events = _chrome.events(analyses_of(dump(group(*members))))
    tracks = {pid: [(a, b, each["name"]) for a, b, each in track] for (pid, _), track in slices(events).items()}
    assert tracks == {
        0: [(0, 3999, "all_reduce #1"), (0, 2006, "waiting for rank 1"), (2006, 3999, "working")],
        1: [(2006, 3499, "all_reduce #1"), (2006, 3499, "working")],
    }
    (found,) = {json.dumps(each["args"]) for each in events if each.get("cat") == "collective"}
    assert json.loads(found) == {
        "call": "all_reduce(float32, 512, sum)",
        "bytes": 2048,
        "algorithm": 1,
        "status": "ok",
        "group": "tp",
        "channel": 0,
    }


def test_a_rank_that_waits_in_vain_waits_to_the_end_and_works_never():
    events = _chrome.events(analyses_of(stuck()))
    last = [track[-2:] for (pid, _), track in sorted(slices(events).items()) if pid != 2]
    assert [[each["name"] for _, _, each in pair] for pair in last] == [["all_reduce #3", "waiting for rank 2"]] * 3
    assert {end for pair in last for _, end, _ in pair} == {10 * SECOND - 5 * SECOND}


def test_errors_are_marked_where_they_happened():
    end = 2_500
    failed = member(0, channel(entry(1, 500, end, status="PHX_ERR_TIMEOUT")))
    error = failure("PHX_ERR_TIMEOUT", 1, text="rank 1 is late")
    events = _chrome.events(analyses_of(dump(group(failed, member(1), state="failed", error=error))))
    (mark,) = [each for each in events if each["ph"] == "i"]
    assert (mark["name"], mark["ts"], mark["pid"]) == ("PHX_ERR_TIMEOUT", 2.0, 0)
    assert mark["args"] == {"call": "all_reduce(float32, 512, sum)", "first error": "rank 1 is late"}


def test_ranks_of_one_number_on_two_hosts_are_two_processes_on_one_clock():
    here = dump(group(member(0, channel(entry(1, 9 * SECOND, 9 * SECOND + 10)))))
    there = dump(group(member(0, channel(entry(1, SECOND, SECOND + 10)))), host="node2", dumped_ns=3 * SECOND)
    there["dumped_unix_ns"] = here["dumped_unix_ns"]  # a clock that is 7 s behind
    events = _chrome.events(analyses_of(here, there))
    assert [each["args"]["name"] for each in events if each["name"] == "process_name"] == [
        "rank 0 (pid 4121) on node1",
        "rank 0 (pid 4121) on node2",
    ]
    assert {pid: track[0][0] for (pid, _), track in slices(events).items()} == {0: SECOND, 1: 0}


@pytest.mark.parametrize("scale", [10**3, 10**6, 10**9, 10**12, 10**15])
def test_times_keep_their_nanoseconds(scale):
    draw = random.Random(scale)
    for nanoseconds in [*range(3000), *(draw.randrange(scale) for _ in range(3000))]:
        text = json.dumps(_chrome._us(nanoseconds))
        assert int(float(text) * 1000) == nanoseconds, text


# ---- the picture ------------------------------------------------------------------------------------------------


def boxes(picture, fill):
    return [shape for shape in picture.shapes[10:] if isinstance(shape, _picture.Box) and shape.fill == fill]


def labels(picture):
    return [shape.text for shape in picture.shapes if isinstance(shape, _picture.Label)]


def test_the_picture_shows_who_waits_and_who_is_not_there():
    picture = _picture.draw(analyses_of(stuck()), 20)
    waiting, (missing,) = boxes(picture, _picture.WAITING), boxes(picture, _picture.ABSENT)
    assert len(waiting) == 9 and len(boxes(picture, _picture.WORKING)) == 8
    assert (missing.edge, missing.title) == (_picture.ALARM, "all_reduce #3: not started")
    longest = max(waiting, key=lambda box: box.width)
    assert longest.title == "all_reduce #3: all_reduce(float32, 512, sum), 4.2 s, pending; 4.2 s waiting for rank 2"
    assert abs(missing.x - longest.x) < 0.01 and missing.y == longest.y + 2 * _picture.ROW
    assert "rank 2 (pid 4123, stopped)" in labels(picture) and "all_reduce #3: not started" in labels(picture)


@pytest.mark.parametrize("seed", range(20))
def test_boxes_of_a_row_stay_inside_the_picture_and_do_not_overlap(seed):
    picture = _picture.draw(analyses_of(crowd(seed)), 50)
    rows = {}
    for shape in picture.shapes[10:]:
        if isinstance(shape, _picture.Box):
            assert shape.width >= 0 and shape.height > 0
            assert shape.x >= _picture.LEFT - 0.01 and shape.x + shape.width <= picture.width
            assert shape.y + shape.height < picture.height
            if shape.fill in (_picture.WORKING, _picture.WAITING, _picture.FAILED) and shape.width > 1:
                rows.setdefault(shape.y, []).append((shape.x, shape.x + shape.width))
    for row in rows.values():
        row.sort()
        assert all(left[1] <= right[0] + 0.01 for left, right in pairwise(row))


def test_last_counts_the_collectives_that_are_drawn():
    picture = _picture.draw(analyses_of(stuck()), 1)
    assert not boxes(picture, _picture.WORKING) and len(boxes(picture, _picture.WAITING)) == 3


def test_svg_is_well_formed_and_says_what_the_picture_says():
    made = stuck()
    made["groups"][0]["name"] = "<a & 'b'>"
    picture = _picture.draw(analyses_of(made), 20)
    root = xml.etree.ElementTree.fromstring(_picture.svg(picture))
    assert root.tag == f"{SVG}svg" and root.get("viewBox") == f"0 0 {picture.width} {picture.height}"
    assert [each.text for each in root.iter(f"{SVG}text")] == labels(picture)
    titles = [each.text for each in root.iter(f"{SVG}title")]
    assert titles == [shape.title for shape in picture.shapes if getattr(shape, "title", "")]


def test_a_picture_of_nothing_says_so():
    assert "no collective is on record" in labels(_picture.draw(analyses_of(dump(group(member(0)))), 5))


def test_the_command_writes_the_files(tmp_path, capsys):
    (path,) = write(tmp_path, stuck())
    chrome, svg = tmp_path / "chrome.json", tmp_path / "picture.svg"
    assert main([path, "--chrome", str(chrome), "--picture", str(svg)]) == 0
    analyses = analyses_of(stuck())
    assert chrome.read_text() == _chrome.text(analyses)
    assert svg.read_text() == _picture.svg(_picture.draw(analyses, 20))


def test_png_has_the_size_and_colours_of_the_picture(tmp_path):
    image = pytest.importorskip("matplotlib.image", reason="needs matplotlib")
    made = stuck()
    made["groups"][0]["name"] = "$\\frac{"  # no formula, and no error
    picture = _picture.draw(analyses_of(made), 20)
    path = tmp_path / "picture.png"
    _picture.write(picture, path)
    pixels = image.imread(path)
    assert pixels.shape[:2] == (picture.height, picture.width)
    box = max(boxes(picture, _picture.WAITING), key=lambda box: box.width)
    seen = pixels[int(box.y + 3), int(box.x + box.width - 20), :3]
    assert [round(float(value) * 255) for value in seen] == [0xF6, 0xD5, 0x8E]


def test_a_picture_too_large_for_png_is_refused_with_advice(tmp_path):
    picture = _picture.Picture(100, _picture.LARGEST_PNG, [])
    with pytest.raises(DumpError, match="write .svg"):
        _picture.write(picture, tmp_path / "picture.png")
