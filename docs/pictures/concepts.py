"""The pictures that explain: shared memory, groups, each collective, layouts, and what happens on a failure."""

from __future__ import annotations

from collections.abc import Iterator

from plots import newest
from svg import (
    BLUE,
    GREEN,
    GREY,
    INK,
    LIGHT_BLUE,
    LIGHT_GREEN,
    LIGHT_ORANGE,
    LIGHT_RED,
    LINE,
    MUTED,
    ORANGE,
    PANEL,
    RANKS,
    RED,
    Picture,
)


def pictures() -> Iterator[tuple[str, Picture]]:
    """Each picture with the name of its file."""
    yield "sockets_or_memory", sockets_or_memory()
    yield "world_group", world_group()
    yield "shots", shots()
    yield "mlp", mlp()
    yield "zero_copy", zero_copy()
    yield "rails", rails()
    yield "failure", failure()
    yield "packages", packages()
    for name, (before, after, caption) in COLLECTIVES.items():
        yield name, figure(name, before, after, caption)
    yield "barrier", barrier()
    yield "send_recv", send_recv()


def sockets_or_memory() -> Picture:
    p = Picture(860, 330, "Two processes of one host: through sockets, and through shared memory")
    p.text(215, 30, "Through sockets", size=16, bold=True)
    p.text(645, 30, "Through shared memory", size=16, bold=True)
    p.line([(430, 16), (430, 314)], colour=LINE, width=1, dashed=True)
    for left in (40, 250):
        rank = 0 if left == 40 else 1
        p.box(left, 55, 140, 70, fill=PANEL, stroke=MUTED)
        p.text(left + 70, 76, f"rank {rank}", bold=True)
        p.box(left + 25, 86, 90, 28, "tensor", fill=RANKS[rank])
    p.box(40, 185, 350, 90, fill=GREY)
    p.text(215, 265, "kernel", size=12, colour=MUTED)
    p.box(65, 200, 100, 36, "socket buffer", fill=LIGHT_ORANGE, stroke=ORANGE, size=12)
    p.box(265, 200, 100, 36, "socket buffer", fill=LIGHT_ORANGE, stroke=ORANGE, size=12)
    p.arrow((110, 116), (110, 198), colour=ORANGE, text="copy in", shift=(28, 4))
    p.arrow((167, 218), (263, 218), colour=ORANGE, text="TCP / loopback", shift=(0, -6))
    p.arrow((320, 198), (320, 116), colour=ORANGE, text="copy out", shift=(-32, 4))
    p.text(215, 300, "system calls; the kernel copies every byte twice", size=13, colour=ORANGE)
    for left in (470, 680):
        rank = 0 if left == 470 else 1
        p.box(left, 55, 140, 70, fill=PANEL, stroke=MUTED)
        p.text(left + 70, 76, f"rank {rank}", bold=True)
        p.box(left + 25, 86, 90, 28, "kernel adds", fill=RANKS[rank], size=12)
    p.box(470, 185, 350, 90, fill=LIGHT_GREEN, stroke=GREEN)
    p.box(490, 200, 150, 36, "block of rank 0", fill=RANKS[0])
    p.box(650, 200, 150, 36, "block of rank 1", fill=RANKS[1])
    p.text(645, 262, "memory that both processes have mapped", size=12, colour=MUTED)
    p.arrow((540, 198), (540, 126), colour=GREEN)
    p.arrow((665, 198), (580, 126), colour=GREEN)
    p.arrow((625, 198), (710, 126), colour=GREEN)
    p.arrow((750, 198), (750, 126), colour=GREEN)
    p.text(645, 166, "loads", size=12, colour=GREEN)
    p.text(645, 300, "cache lines move between cores; no system call", size=13, colour=GREEN)
    return p


def world_group() -> Picture:
    p = Picture(
        860, 400, "Ranks find each other in a store; a group shares memory; a rendezvous makes symmetric memory"
    )
    p.box(310, 20, 240, 46, "store\nfile, TCP, memory or callbacks", fill=LIGHT_ORANGE, stroke=ORANGE, size=12)
    for rank in range(4):
        left = 40 + 200 * rank
        p.box(left, 110, 180, 250, fill=PANEL, stroke=MUTED)
        p.text(left + 90, 132, f"process: world of rank {rank}", size=12, bold=True)
        p.arrow((left + 90, 108), (340 + 60 * rank, 68), colour=ORANGE, dashed=True)
    p.text(90, 84, "1  records", size=12, colour=ORANGE)
    p.box(50, 150, 360, 190, fill=LIGHT_BLUE, stroke=BLUE)
    p.text(230, 170, "2  group 'a' of ranks 0 and 1", size=13, colour=BLUE, bold=True)
    p.box(450, 150, 360, 190, fill=LIGHT_BLUE, stroke=BLUE)
    p.text(630, 170, "2  group 'b' of ranks 2 and 3", size=13, colour=BLUE, bold=True)
    for rank in range(4):
        left = 60 + 200 * rank
        p.box(left, 182, 140, 34, "slots for collectives", fill=RANKS[rank], size=12)
        p.box(left, 256, 140, 50, "block and\nsignal pad", fill=RANKS[rank], size=12)
    for left in (60, 460):
        p.box(left - 5, 234, 350, 82, fill="none", stroke=GREEN, dashed=True)
        p.text(left + 170, 248, "3  symmetric memory, after a rendezvous", size=12, colour=GREEN)
    p.text(
        430, 384, "1: ranks meet in a store.   2: they map each other's segments.   3: each may add memory.", size=12
    )
    return p


def shots() -> Picture:
    p = Picture(860, 380, "One-shot and two-shot all_reduce with four ranks")
    for top, title, lines in (
        (20, "One-shot: small data", ("one arrival; every rank reads", "everything and adds it", "moved: (n-1) B")),
        (
            200,
            "Two-shot: large data",
            (
                "one arrival for each chunk, and one more;",
                "rank p adds part p of all, and the",
                "others fetch it.  moved: 2 (n-1)/n B",
            ),
        ),
    ):
        p.text(20, top + 16, title, size=15, bold=True, anchor="start")
        for index, line in enumerate(lines):
            p.text(20, top + 44 + 18 * index, line, size=12, anchor="start", colour=MUTED)
    for rank in range(4):
        left = 330 + 130 * rank
        p.box(left, 20, 110, 34, f"slot of rank {rank}", fill=RANKS[rank], size=12)
        p.box(left, 124, 110, 34, "0 + 1 + 2 + 3", fill=LIGHT_GREEN, stroke=GREEN, size=12)
        for other in range(4):
            p.arrow((330 + 130 * other + 55, 56), (left + 25 + 20 * other, 122), colour=MUTED, width=1)
    for rank in range(4):
        left = 330 + 130 * rank
        for part in range(4):
            p.box(left + 27 * part, 200, 26, 28, "abcd"[part], fill=RANKS[rank], size=12)
        p.box(left + 27, 268, 56, 28, f"Σ {'abcd'[rank]}", fill=LIGHT_GREEN, stroke=GREEN, size=12)
        for part in range(4):
            p.box(left + 27 * part, 336, 26, 28, "abcd"[part], fill=LIGHT_GREEN, stroke=GREEN, size=12)
        for other in range(4):
            p.arrow((330 + 130 * other + 27 * rank + 13, 229), (left + 34 + 14 * other, 266), width=1)
            p.arrow((330 + 130 * other + 55, 297), (left + 27 * other + 13, 334), colour=GREEN, width=1)
    return p


def mlp() -> Picture:
    p = Picture(860, 330, "An MLP that is split over two ranks, with its one all_reduce")
    p.text(250, 28, "A is cut by columns", size=14, bold=True)
    p.text(505, 28, "B is cut by rows", size=14, bold=True)
    for rank in range(2):
        y = 50 + 140 * rank
        p.box(15, y, 690, 120, fill=PANEL, stroke=LINE)
        p.text(30, y + 18, f"rank {rank}", bold=True, anchor="start")
        p.box(30, y + 45, 80, 44, "x\nwhole", size=12)
        p.box(185, y + 32, 130, 70, fill=PANEL, stroke=LINE, dashed=True)
        p.box(185 + 65 * rank, y + 32, 65, 70, f"A{rank}", fill=RANKS[rank], bold=True)
        p.box(360, y + 45, 70, 44, f"relu\nx A{rank}", fill=RANKS[rank], size=12)
        p.box(470, y + 27, 70, 80, fill=PANEL, stroke=LINE, dashed=True)
        p.box(470, y + 27 + 40 * rank, 70, 40, f"B{rank}", fill=RANKS[rank], bold=True)
        p.box(590, y + 45, 95, 44, f"part of the\nsum y{rank}", fill=RANKS[rank], size=12)
        for x1, x2 in ((110, 183), (315, 358), (430, 468), (540, 588)):
            p.arrow((x1, y + 67), (x2, y + 67))
        p.arrow((685, y + 67), (732, 185 if rank else 170), colour=GREEN, width=2)
    p.box(735, 145, 115, 66, "all_reduce\ny = y0 + y1", fill=LIGHT_GREEN, stroke=GREEN, bold=True)
    p.text(
        360,
        322,
        "forward: one all_reduce for the two products.  backward: one more, for the gradient of x.",
        size=13,
        colour=MUTED,
    )
    return p


def zero_copy() -> Picture:
    p = Picture(860, 340, "A compiled graph: the kernel writes into symmetric memory, and the peers read it there")
    p.text(215, 28, "With copies", size=15, bold=True)
    p.text(645, 28, 'torch.compile(backend="phalanx")', size=15, bold=True)
    p.line([(430, 16), (430, 324)], colour=LINE, width=1, dashed=True)
    chain = (
        ("kernel of x @ w", RANKS[0]),
        ("tensor", GREY),
        ("slot in shared memory", LIGHT_ORANGE),
        ("sum", LIGHT_GREEN),
    )
    steps = ("writes", "copy in", "peers read and add")
    for index, (text, fill) in enumerate(chain):
        p.box(115, 50 + 72 * index, 200, 36, text, fill=fill)
        if index:
            p.arrow((215, 14 + 72 * index), (215, 48 + 72 * index), colour=ORANGE if index == 2 else MUTED)
            p.text(
                228, 36 + 72 * index, steps[index - 1], size=12, colour=ORANGE if index == 2 else MUTED, anchor="start"
            )
    for rank in range(2):
        left = 455 + 200 * rank
        p.text(left + 90, 52, f"rank {rank}", bold=True)
        p.box(left, 62, 180, 36, "kernel of x @ w", fill=RANKS[rank])
        p.arrow((left + 90, 98), (left + 90, 174), colour=GREEN, text="writes", shift=(-28, -8))
        p.box(left, 265, 180, 36, "sum, used by the next kernel", fill=LIGHT_GREEN, stroke=GREEN, size=12)
    p.box(445, 150, 400, 64, fill=LIGHT_BLUE, stroke=BLUE)
    p.text(645, 166, "arena: symmetric memory", size=12, colour=BLUE)
    for rank in range(2):
        p.box(465 + 200 * rank, 176, 160, 30, "output of the kernel", fill=RANKS[rank], size=12)
        for other in range(2):
            p.arrow((545 + 200 * other, 206), (535 + 200 * rank + 20 * other, 263), colour=GREEN)
    p.text(645, 326, "no tensor in between, no copy", size=13, colour=GREEN)
    return p


def rails() -> Picture:
    p = Picture(860, 350, "Two hosts with two ranks each: memory within a host, rails between the hosts")
    for host in range(2):
        left = 30 + 480 * host
        p.box(left, 40, 320, 250, fill=PANEL, stroke=MUTED)
        p.text(left + 160, 64, f"host {'AB'[host]}", size=14, bold=True)
        p.box(left + 105, 110, 110, 150, fill=LIGHT_BLUE, stroke=BLUE)
        p.text(left + 160, 180, "shared", size=12, colour=BLUE)
        p.text(left + 160, 196, "memory", size=12, colour=BLUE)
        for index in range(2):
            rank = 2 * host + index
            x, y = (left + 225 if host == 0 else left + 10), 110 + 90 * index
            p.box(x, y, 85, 60, f"rank {rank}\nsums part {index}", fill=RANKS[rank], size=12)
    for index, y in enumerate((140, 230)):
        p.arrow((343, y - 8), (517, y - 8), colour=GREEN, width=2, text=f"rail {index} (UCX)")
        p.arrow((517, y + 8), (343, y + 8), colour=GREEN, width=2)
    p.line([(350, 185), (510, 185)], colour=ORANGE, dashed=True)
    p.text(430, 180, "links between all pairs", size=11, colour=ORANGE)
    p.text(430, 200, "TCP: control only", size=11, colour=ORANGE)
    p.text(
        430,
        314,
        "1  the ranks of a host add their parts in shared memory   2  each rail carries its part of the sums",
        size=12,
    )
    p.text(430, 334, "3  every rank copies the result from the shared memory of its host", size=12)
    return p


def failure() -> Picture:
    p = Picture(860, 330, "A rank is killed: the others are told within milliseconds, shrink the group and go on")
    times = ((190, "all_reduce"), (330, "SIGKILL"), (450, "named"), (590, "shrink"), (740, "goes on"))
    for x, label in times:
        p.text(x, 30, label, size=13, bold=True, colour=RED if label == "SIGKILL" else INK)
        p.line([(x, 40), (x, 262)], colour="#e1e7ed", width=1)
    for rank in range(4):
        y = 65 + 55 * rank
        p.text(20, y + 5, f"rank {rank}", bold=True, anchor="start")
        dead = rank == 2
        p.line([(80, y), (330 if dead else 840, y)], colour=MUTED, width=2)
        p.box(150, y - 13, 80, 26, "all_reduce", fill=LIGHT_GREEN, stroke=GREEN, size=12)
        if dead:
            p.line([(322, y - 8), (338, y + 8)], colour=RED, width=3)
            p.line([(322, y + 8), (338, y - 8)], colour=RED, width=3)
            p.text(420, y + 5, "dies, for whatever reason", size=12, colour=RED)
            continue
        p.box(280, y - 13, 130, 26, "waits in all_reduce", fill=GREY, size=12)
        p.box(418, y - 13, 90, 26, "PeerDeadError", fill=LIGHT_RED, stroke=RED, size=12)
        p.box(540, y - 13, 100, 26, "group.shrink()", fill=LIGHT_ORANGE, stroke=ORANGE, size=12)
        p.box(690, y - 13, 100, 26, "3 ranks go on", fill=LIGHT_GREEN, stroke=GREEN, size=12)
    path, result = newest("fault-campaign")
    kill = result["kinds"]["kill"]
    told, shrunk = kill["time_to_error_ms"]["4"]["p50"], kill["shrink_ms"]["p50"]
    text = f"medians: {told} ms from SIGKILL to the error (4 ranks on 2 cores), {shrunk} ms to shrink (2 to 8 ranks)"
    p.text(430, 290, text, size=12)
    p.text(430, 310, f"{result['date']}, fault campaign, benchmarks/results/{path}", size=11, colour=MUTED)
    return p


def packages() -> Picture:
    p = Picture(860, 430, "The packages, and what each one uses")
    p.box(30, 20, 800, 44, "phalanx.tools: the commands bench, demo, trace, tune and verify", fill=GREY)
    p.box(30, 110, 250, 60, "phalanx.symm_mem\nsymmetric tensors, signals", fill=RANKS[0])
    p.box(305, 110, 250, 60, "phalanx.dtensor\nsharded tensors, parallel styles", fill=RANKS[0])
    p.box(580, 110, 250, 60, "phalanx.inductor_plugin\nthe backend of torch.compile", fill=RANKS[0])
    p.box(
        30, 220, 800, 50, "phalanx.collectives: functional collectives, the backend of torch.distributed", fill=RANKS[1]
    )
    p.box(30, 320, 800, 90, fill=RANKS[2])
    p.text(430, 342, "phalanx.core: no torch needed", size=13)
    p.box(50, 355, 240, 42, "Python binding (cffi)", fill=PANEL, size=12)
    p.box(310, 355, 240, 42, "libphalanx_torch.so: operators", fill=PANEL, size=12)
    p.box(570, 355, 240, 42, "libphalanx.so.0: the C ABI", fill=PANEL, stroke=GREEN, bold=True)
    for x in (155, 430, 705):
        p.arrow((x, 64), (x, 108))
        p.arrow((x, 170), (x, 218))
    p.arrow((430, 270), (430, 318))
    p.arrow((845, 42), (852, 42), (852, 362), (832, 362))
    p.line([(830, 42), (846, 42)])
    return p


# ---- one figure for each collective --------------------------------------------------------------------------------

Cells = list[list[tuple[str, int]]]  # for each rank its blocks: the text, and whose colour it has; -1 for a sum


def figure(name: str, before: Cells, after: Cells, caption: str) -> Picture:
    cell, left = 74, 90
    wide_before, wide_after = (cell * max(map(len, cells)) for cells in (before, after))
    middle = left + wide_before + 20
    right = middle + 130
    p = Picture(right + wide_after + 20, 62 + 46 * len(before), f"{name}: {caption}")
    p.text(left + wide_before / 2, 22, "before", size=12, colour=MUTED)
    p.text(right + wide_after / 2, 22, "after", size=12, colour=MUTED)
    for rank, rows in enumerate(zip(before, after, strict=True)):
        y = 32 + 46 * rank
        p.text(14, y + 23, f"rank {rank}", bold=True, anchor="start")
        for start, row in zip((left, right), rows, strict=True):
            if not row:
                p.box(start, y, cell, 36, fill="none", dashed=True)
            for index, (text, owner) in enumerate(row):
                fill, stroke = (LIGHT_GREEN, GREEN) if owner < 0 else (RANKS[owner], LINE)
                p.box(start + cell * index, y, cell, 36, text, fill=fill, stroke=stroke)
    y = 32 + 23 * len(before)
    p.arrow((middle, y), (middle + 110, y), width=2, text=name, shift=(-2, -8))
    p.text(p.width / 2, p.height - 9, caption, size=12, colour=MUTED)
    return p


def own(count: int = 3) -> Cells:
    return [[("abc"[rank], rank)] for rank in range(count)]


def blocks() -> Cells:
    return [[(f"{'abc'[rank]}{block}", rank) for block in range(3)] for rank in range(3)]


def only(rank: int, row: list[tuple[str, int]]) -> Cells:
    return [row if each == rank else [] for each in range(3)]


SUM = ("a+b+c", -1)
ALL = [row[0] for row in own()]
PARTS = [[(f"b{rank}", 1)] for rank in range(3)]  # of the root
SUMS = [[(f"a{rank}+b{rank}+c{rank}", -1)] for rank in range(3)]
SWAPPED = [[(f"{'abc'[source]}{rank}", source) for source in range(3)] for rank in range(3)]
COLLECTIVES: dict[str, tuple[Cells, Cells, str]] = {
    "all_reduce": (own(), [[SUM]] * 3, "every rank gets the sum of all (or their maximum, ...)"),
    "all_gather": (own(), [ALL] * 3, "every rank gets the blocks of all"),
    "reduce_scatter": (blocks(), SUMS, "rank i gets block i of the sum of all"),
    "all_to_all": (blocks(), SWAPPED, "rank i gets block i of every rank"),
    "broadcast": (only(1, [("b", 1)]), [[("b", 1)]] * 3, "every rank gets what the root (rank 1) has"),
    "reduce": (own(), only(1, [SUM]), "the root (rank 1) gets the sum of all"),
    "gather": (own(), only(1, ALL), "the root (rank 1) gets the blocks of all"),
    "scatter": (only(1, [row[0] for row in PARTS]), PARTS, "rank i gets block i of the root (rank 1)"),
}


def barrier() -> Picture:
    p = Picture(620, 190, "barrier: no rank goes on before all have come")
    for rank, arrives in enumerate((140, 330, 230)):
        y = 40 + 42 * rank
        p.text(14, y + 5, f"rank {rank}", bold=True, anchor="start")
        p.line([(75, y), (arrives, y)], colour=BLUE, width=3)
        p.line([(arrives, y), (350, y)], colour=LINE, width=3, dashed=True)
        p.circle(arrives, y, 5, fill=BLUE, note="arrives")
        p.arrow((350, y), (590, y), colour=BLUE, width=3)
    p.line([(350, 22), (350, 150)], colour=ORANGE, width=2)
    p.text(350, 16, "the last one has come", size=12, colour=ORANGE)
    p.text(310, 178, "no data moves; no rank goes on before all have come", size=12, colour=MUTED)
    return p


def send_recv() -> Picture:
    p = Picture(620, 170, "send and recv: one rank to another, matched by rank and tag")
    p.box(30, 30, 150, 80, "rank 0\nsend(a, to=2, tag=7)", fill=RANKS[0], size=12)
    p.box(440, 30, 150, 80, "rank 2\nrecv(from=0, tag=7)", fill=RANKS[2], size=12)
    p.arrow((180, 70), (438, 70), colour=GREEN, width=2, text="a, in the order of sending")
    p.text(310, 128, "rank 1 takes no part", size=12, colour=MUTED)
    p.text(310, 152, "small messages travel at once; large ones when the receive is there", size=12, colour=MUTED)
    return p
