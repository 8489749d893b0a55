"""The one-line language of sharding rules: what a rule says, read from its text.

    m k, k n -> m n ; k:sum ; lin 0|1          matmul
    ..., ... -> ... ; lin 0+1 ; up 0|1         add
    a x! -> a x!                               softmax over the last dim
    (a b) -> a b ; size 1                      view; argument 1 is the shape of output 0

Left of the arrow are the tensors that go in, right of it those that come out, in the order of the op's arguments and
results; a tensor is a list of dims:

    k         a factor: dims of the same letter are cut together
    k!        a factor that must stay whole wherever it stands
    (a b)     a dim made of several factors, the outermost first
    1         a dim of size 1 that is tied to nothing
    ...       the batch dims; several inputs with them broadcast against each other, the last dims aligned
    *         a tensor of any rank that must be whole, as the only word
    ?         a tensor of any rank of which nothing is read, as the only word: it stays as it is

Clauses follow, each after a semicolon:

    k:sum         cutting k, which an output lacks, leaves that output a Partial(sum); also max, min, prod; mean, a sum
                  of which each rank scales its part by its share of k; and same: the output does not depend on k
    k:sum+2       the same, and input 2, which lacks k, must be a Partial too: the bias of addmm is added once only
    scale k       cutting k scales what the op returns by the share of k that a rank has: gradients of means
    full k        k is cut only where every rank gets a part of it: for kernels that fail on nothing
    lin 0|1+2     linear: a Partial(sum) passes through input 0 alone, or through 1 and 2 when both are
    up 0, down 0  rising or falling in that input: Partial(max) and Partial(min) pass, falling swaps the two
    max 0+1       Partial(max) passes as it is (also min, prod)
    pass 0        a Partial of any kind passes as it is: views, copies
    drop 0        input 0 is not read, only its shape: whatever Partial it is, what comes out is whole
    size 1        argument 1 is the shape of output 0 (`size 1=2`: of output 2) and becomes the local one
    count 3=n     argument 3 is the number n and becomes the local one
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import NoReturn

BATCH = "..."
"""The name under which the batch dims stand in `Tensor.dims` and in clauses."""

REDUCTIONS = ("sum", "mean", "max", "min", "prod", "same")
PASSES = ("lin", "up", "down", "max", "min", "prod", "pass", "drop")


class RuleError(ValueError):
    """A rule's text is malformed, and the message shows where; or it is not for tensors of these ranks."""


Dim = tuple[str, ...]
"""The factors of a dim of a tensor, the outermost first. None: size 1, tied to nothing; BATCH stands alone."""


@dataclass(frozen=True)
class TensorDims:
    """The dims of a tensor of a rule; `dims` is None for a tensor of any rank, whole or (`unread`) as it is."""

    dims: tuple[Dim, ...] | None
    unread: bool = False

    @property
    def batched(self) -> bool:
        return (BATCH,) in (self.dims or ())

    @property
    def explicit_count(self) -> int:
        """How many dims stand there one by one, the batch dims apart."""
        return len(self.dims or ()) - self.batched


@dataclass(frozen=True)
class Reduction:
    """`factor:op+with_inputs`: what cutting a factor leaves in the outputs that lack it."""

    factor: str
    op: str
    with_inputs: tuple[int, ...] = ()


@dataclass(frozen=True)
class Pass:
    """Which inputs may be Partial together, and of what kind (one of PASSES)."""

    kind: str
    inputs: tuple[int, ...]


@dataclass(frozen=True)
class Rule:
    """A rule as it was read. Everything in it is hashable."""

    text: str
    inputs: tuple[TensorDims, ...]
    outputs: tuple[TensorDims, ...]
    whole: frozenset[str] = frozenset()
    reductions: tuple[Reduction, ...] = ()
    scaled: frozenset[str] = frozenset()
    full: frozenset[str] = frozenset()
    passes: tuple[Pass, ...] = ()
    size_args: tuple[tuple[int, int], ...] = ()  # (argument, output whose shape it is)
    count_args: tuple[tuple[int, str], ...] = ()  # (argument, factor whose size it is)


_TOKEN = re.compile(r"\s*(?:(->|\.\.\.|[a-z_][a-z_0-9]*|[0-9]+|[(),;:!+|*=?])|(\S))")


class _Reader:
    """Reads the tokens of a rule from left to right."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[tuple[str, int]] = []
        self.at = 0
        self.whole: set[str] = set()
        for match in _TOKEN.finditer(text):
            if match.group(2):
                self.fail("has an unexpected character", match.start(2))
            self.tokens.append((match.group(1), match.start(1)))
        self.tokens += [("", len(text.rstrip()))] * 2  # the second is there when the first has been taken

    def fail(self, what: str, column: int | None = None) -> NoReturn:
        if column is None:
            column = self.tokens[self.at][1]
        raise RuleError(f"a sharding rule {what}, at column {column + 1}:\n  {self.text}\n  {' ' * column}^")

    @property
    def next(self) -> str:
        return self.tokens[self.at][0]

    def take(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1][0]

    def taken(self, token: str) -> bool:
        if self.next != token:
            return False
        self.at += 1
        return True

    def number(self, what: str, below: int | None = None) -> int:
        if not self.next.isdigit():
            self.fail(f"lacks the number of {what}")
        if below is not None and int(self.next) >= below:
            self.fail(f"names {what} {self.next}, but there are {below}")
        return int(self.take())

    # ---- tensors -----------------------------------------------------------------------------------------------------

    def factor(self) -> str:
        if not (self.next[:1].isalpha() or self.next[:1] == "_"):
            self.fail("lacks a factor (a lower-case name)" if self.next else "ends where a factor is expected")
        name = self.take()
        if self.taken("!"):
            self.whole.add(name)
        return name

    def group(self) -> Dim:
        factors: list[str] = []
        while not self.taken(")"):
            if self.next in ("(", "", ";", ",", "->", BATCH):
                self.fail("does not close its '('" if self.next != BATCH else "has batch dims inside a group")
            factors.append(self.factor())
        if not factors:
            self.at -= 1
            self.fail("has an empty group; a dim of size 1 is written 1")
        return tuple(factors)

    def tensor(self) -> TensorDims:
        if self.next in ("*", "?"):
            word = self.take()
            if self.next not in (",", ";", "->", ""):
                self.fail(f"has dims together with '{word}', which stands for a tensor of any rank")
            return TensorDims(None, word == "?")
        dims: list[Dim] = []
        seen: set[str] = set()
        while self.next not in (",", ";", "->", ""):
            column = self.tokens[self.at][1]
            if self.taken(BATCH):
                dim: Dim = (BATCH,)
            elif self.taken("1"):
                dim = ()
            else:
                dim = self.group() if self.taken("(") else (self.factor(),)
            for name in dim:
                if name in seen:
                    # A diagonal: no cut of one dim alone leaves the other right.
                    what = "the batch dims" if name == BATCH else f"factor '{name}'"
                    self.fail(f"has {what} twice in one tensor", column)
                seen.add(name)
            dims.append(dim)
        return TensorDims(tuple(dims))

    def tensors(self, end: tuple[str, ...]) -> tuple[TensorDims, ...]:
        found = [self.tensor()]
        while self.taken(","):
            found.append(self.tensor())
        if self.next not in end:
            self.fail("lacks '->' and the output tensors" if "->" in end else "has a second '->'")
        return tuple(found)

    # ---- clauses -----------------------------------------------------------------------------------------------------

    def joint(self, count: int) -> tuple[int, ...]:
        inputs = [self.number("an input", count)]
        while self.taken("+"):
            inputs.append(self.number("an input", count))
        if len(set(inputs)) != len(inputs):
            self.fail("names an input twice in one '+'")
        return tuple(inputs)

    def check_name(self, name: str, known: set[str], column: int | None = None) -> None:
        if name not in known:
            self.fail(f"has a clause on '{name}', which is not a factor of its tensors", column)

    def name_in(self, known: set[str]) -> str:
        self.check_name(self.next, known)
        return self.take()

    def reduction(
        self, name: str, column: int, inputs: tuple[TensorDims, ...], outputs: tuple[TensorDims, ...]
    ) -> Reduction:
        """What follows `name:`."""
        self.check_name(name, _names(inputs), column)
        if all(name in _names((output,)) for output in outputs):
            self.fail(f"reduces '{name}', but every output has it", column)
        if name in self.whole:
            self.fail(f"reduces '{name}', which must be whole", column)
        if self.next not in REDUCTIONS:
            self.fail(f"reduces by unknown reduce op '{self.next}'; expected one of {', '.join(REDUCTIONS)}")
        op = self.take()
        with_inputs: tuple[int, ...] = ()
        if self.taken("+"):
            if op not in ("sum", "mean"):
                self.fail(f"joins an input to a reduction by {op}, which is allowed for sums only")
            with_inputs = self.joint(len(inputs))
            for index in with_inputs:
                if name in _names((inputs[index],)):
                    self.fail(f"joins input {index} to the reduction of '{name}', but that input has '{name}'", column)
        return Reduction(name, op, with_inputs)


def _names(tensors: tuple[TensorDims, ...]) -> set[str]:
    return {name for tensor in tensors for dim in tensor.dims or () for name in dim}


@cache
def parse(text: str) -> Rule:
    """Read a rule in the language that the head of this module describes; the same text gives the same object."""
    reader = _Reader(text)
    inputs = reader.tensors(("->",))
    reader.take()
    outputs = reader.tensors((";", ""))
    names = _names(inputs) | _names(outputs)
    reductions: list[Reduction] = []
    passes: list[Pass] = []
    marked: dict[str, set[str]] = {"scale": set(), "full": set()}
    sizes: list[tuple[int, int]] = []
    counts: list[tuple[int, str]] = []
    while reader.taken(";"):
        column = reader.tokens[reader.at][1]
        word = reader.take()
        if reader.taken(":"):
            reduction = reader.reduction(word, column, inputs, outputs)
            if any(one.factor == reduction.factor for one in reductions):
                reader.fail(f"reduces '{reduction.factor}' twice", column)
            reductions.append(reduction)
        elif word in PASSES:
            passes.append(Pass(word, reader.joint(len(inputs))))
            while reader.taken("|"):
                passes.append(Pass(word, reader.joint(len(inputs))))
        elif word in marked:
            marked[word].add(reader.name_in(names))
            while reader.next not in (";", ""):
                marked[word].add(reader.name_in(names))
        elif word == "size":
            argument = reader.number("an argument")
            sizes.append((argument, reader.number("an output", len(outputs)) if reader.taken("=") else 0))
        elif word == "count":
            argument = reader.number("an argument")
            if not reader.taken("="):
                reader.fail("lacks '=' and the factor that the argument counts")
            counts.append((argument, reader.name_in(names - {BATCH})))
        else:
            known = f"'factor:op', {', '.join(PASSES)}, scale, full, size and count"
            reader.fail(f"has a clause that begins with '{word}'; there are {known}", column)
        if reader.next not in (";", ""):
            reader.fail(f"has '{reader.next}' where a clause must end")
    if reader.next:
        reader.fail(f"goes on with '{reader.next}'")
    for index, tensor in enumerate(outputs):
        if tensor.unread:
            reader.fail(f"has '?' as output {index}; only what goes in may be left as it is", text.index("->"))
        if tensor.batched and not any(one.batched for one in inputs):
            reader.fail(f"has batch dims in output {index} but in no input", text.index("->"))
    return Rule(
        text=text,
        inputs=inputs,
        outputs=outputs,
        whole=frozenset(reader.whole),
        reductions=tuple(reductions),
        scaled=frozenset(marked["scale"]),
        full=frozenset(marked["full"]),
        passes=tuple(passes),
        size_args=tuple(sizes),
        count_args=tuple(counts),
    )
