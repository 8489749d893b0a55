"""The C++ reference, made from phalanx.hpp: `.. cpp-header::` with the option `sections`, and `.. cpp-preamble::`.

Public names of namespace phalanx become entries of Sphinx's C++ domain, with the comment above or behind them and the
functions of the C interface that they call. The collectives are in a base class that is private to the header; they are
shown as members of the classes that have them.
"""

import re
import textwrap
from dataclasses import dataclass, field
from typing import Any

import headers
from c_reference import FromHeader, marked, paragraphs, sentence
from docutils.parsers.rst import directives
from sphinx.application import Sphinx

FILE = "phalanx.hpp"
# Where the members of a private base class are shown, and what its functions return there.
BASES = {"Group": "Collectives", "Symm": "SymmCollectives"}


@dataclass
class Item:
    """A declaration: of a class with its public members, or of something else."""

    kind: str  # class, enum, enumerator, function, type, member
    name: str
    signature: str
    comment: str = ""
    calls: tuple[str, ...] = ()
    items: list["Item"] = field(default_factory=list)
    section: str = ""


def without_conditions(line: str) -> str:
    """A declaration whose template has only the parameters that a caller may give: the others have defaults."""
    if not line.startswith("template"):
        return line
    depth, at, listed = 1, line.index("<") + 1, [""]
    while depth:
        depth += {"<": 1, ">": -1, "(": 1, ")": -1}.get(line[at], 0)
        if depth == 1 and line[at] == ",":
            listed.append("")
        elif depth:
            listed[-1] += line[at]
        at += 1
    return f"template <{', '.join(each.strip() for each in listed if '=' not in each)}>{line[at:]}"


def _signature(code: str) -> str:
    """A declaration without its body, its initializers and what only compilers read."""
    line = re.sub(r"\[\[\w+\]\] |\binline (?!namespace)|constexpr ", "", headers.flat(code)).strip()
    line = without_conditions(line)
    opening = re.search(r"\w+(?: ?<[^()]*>)?\(|operator\S+\(", line)
    if opening and "=" not in re.sub(r"<.*?>|operator\S*", "", line[: opening.start()]):
        depth, at = 1, opening.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(line[at], 0)
            at += 1
        tail = re.match(r"[^{:;=]*", line[at:])
        return line[:at] + (tail.group().rstrip() if tail else "")
    return re.sub(r"\{\d*\}$", "", line.removesuffix(";")).strip()


def _item(code: str, comment: str, scope: str) -> Item | None:
    line = headers.flat(code)
    head = re.match(
        r"(?:template ?<(?:[^<>]|<[^<>]*>)*> )?(enum class|class|struct) (?:\[\[\w+\]\] )?(\w+(?:::\w+)?)", line
    )
    brace = code.find("{")
    if head and head[1] == "enum class":
        values = [value.strip().partition(" =")[0] for value in line[line.index("{") + 1 : line.rindex("}")].split(",")]
        base = re.search(r"enum class \w+ : (\w+)", line)
        return Item(
            "enum-class",
            head[2],
            head[2] + (f" : {base[1]}" if base else ""),
            comment,
            items=[Item("enumerator", value, value) for value in values],
        )
    if head and brace < 0 and comment:  # its specializations say what is in it
        return Item(head[1], head[2], without_conditions(line.removesuffix(";")).replace(f"{head[1]} ", ""), comment)
    if head and brace >= 0 and "(" not in headers.flat(code[:brace]):
        if re.match(rf"(?:template ?<.*?> )?(?:class|struct) (?:\[\[\w+\]\] )?{head[2]} ?<", line):
            return None  # a specialization
        template = re.match(r"template ?<(?:[^<>]|<[^<>]*>)*> ", line)
        access = "public" if head[1] == "struct" else "private"
        return Item(
            head[1],
            head[2],
            (template.group() if template else "") + head[2],
            comment,
            items=items_of(code[brace + 1 : code.rindex("}")], access, head[2]),
        )
    if head or line.startswith(("friend", "static_assert", "namespace", "inline namespace")) or "= delete" in line:
        return None
    signature = _signature(code)
    alias = re.match(r"(?:template ?<.*?> )?using (\w+)", signature)
    if alias:
        return Item("type", alias[1], signature.replace("using ", ""), comment)
    name = re.search(r"(operator\S+?|~?\w+)\(", signature)
    if name and signature[: name.start()].endswith("::"):
        return None  # the definition of a member
    if name:
        special = (
            "= default" in line or name[1] in ("operator=", f"~{scope}") or (name[1] == scope and "&&other" in line)
        )
        calls = tuple(dict.fromkeys(re.findall(r"\b(phx_\w+)\(", code)))
        return None if special else Item("function", name[1], signature, comment, calls)
    variable = re.search(r"(\w+)(?: =.*)?$", signature)
    return Item("member", variable[1], signature, comment) if variable else None


def items_of(text: str, access: str, scope: str = "", private: dict[str, Item] | None = None) -> list[Item]:
    """The public declarations of a scope, in the order of the file."""
    found: list[Item] = []
    above, section, at = "", "", 0
    last: Item | None = None
    while at < len(text):
        space = re.compile(r"\s*").match(text, at)
        assert space
        breaks, at = space.group().count("\n"), space.end()
        if at >= len(text):
            break
        comment = re.compile(r"//[^\n]*(?:\n[ \t]*//[^\n]*)*").match(text, at)
        if comment and breaks == 0:  # behind a declaration: one line
            end = text.find("\n", at)
            if last:
                last.comment = f"{last.comment} {sentence(text[at + 2 : end].strip())}".strip()
            at = end
            continue
        if comment:
            said = re.sub(r"^[ \t]*// ?", "", comment.group(), flags=re.MULTILINE)
            mark = re.match(r"-{4,} (.+?) -{4,}", said)
            section, above = (mark[1], "") if mark else (section, said)
            at = comment.end()
            continue
        if breaks > 1:
            above = ""
        last = None
        label = re.compile(r"(public|private|protected):").match(text, at)
        namespace = re.compile(r"(?:inline )?namespace (\w+) \{").match(text, at)
        if text[at] == "#":
            at = re.compile(r"(?:[^\n]*\\\n)*[^\n]*").match(text, at).end()  # type: ignore[union-attr]
        elif label:
            access, at = label[1], label.end()
        elif namespace and namespace[1] != "detail":
            at = namespace.end()
        elif text[at] in "};":
            at += 1
        else:
            end = headers.end_of(text, at)
            code = text[at:end]
            if namespace and private is not None:
                inner = items_of(code[namespace.end() - namespace.start() : code.rindex("}")], "public", "", {})
                private.update({item.name: item for item in inner if item.items})
            item = last = None if namespace or access != "public" else _item(code, above, scope)
            if item:
                item.section = section
                found.append(item)
            above, at = "", max(end, at + 1)
    return found


def header() -> list[Item]:
    """What phalanx.hpp declares in namespace phalanx."""
    text = headers.path_of(FILE).read_text()
    text = text[[*re.finditer(r"^#\s*include.*\n", text, re.MULTILINE)][-1].end() :]
    private: dict[str, Item] = {}
    found = {}
    for item in items_of(text, "public", "", private):
        if item.name in BASES:
            item.items += [each for each in private[BASES[item.name]].items if each.kind == "function"]
        key = item.signature if item.kind == "function" else item.name
        if key not in found or not found[key].comment:
            found[key] = item
    return list(found.values())


def lines_of(item: Item) -> list[str]:
    said = paragraphs(item.comment)
    if item.calls:
        said += ("\n\n" if said else "") + "Calls " + ", ".join(marked(name) for name in item.calls) + "."
    signature = re.sub(r"^Type ", "Outcome<void> ", item.signature)
    lines = [f".. cpp:{item.kind}:: {signature}", "", textwrap.indent(said, "   "), ""]
    values = [each.name for each in item.items if each.kind == "enumerator"]
    inner = (
        [f".. cpp:enumerator:: {values[0]}", *(f"                    {each}" for each in values[1:]), ""]
        if values
        else []
    )
    inner += [line for each in item.items if each.kind != "enumerator" for line in lines_of(each)]
    return lines + textwrap.indent("\n".join(inner), "   ").split("\n") + [""]


class CppHeader(FromHeader):
    """The declarations of the sections of phalanx.hpp that are named, separated by commas."""

    required_arguments = 0
    option_spec = {"sections": directives.unchanged_required}  # noqa: RUF012

    def lines(self, file: str) -> list[str]:
        wanted = [each.strip() for each in self.options["sections"].split(",")]
        items = header()
        missing = set(wanted) - {item.section for item in items}
        if missing:
            raise self.error(f"{FILE} has no section {', '.join(sorted(missing))}")
        lines = [".. cpp:namespace:: phalanx", ""]
        for item in items:
            if item.section in wanted:
                lines += lines_of(item)
        return [*lines, ".. cpp:namespace:: NULL", ""]


class CppPreamble(FromHeader):
    """The comment with which phalanx.hpp begins, without its first line."""

    required_arguments = 0

    def lines(self, file: str) -> list[str]:
        return paragraphs(headers.preamble(FILE).partition("\n\n")[2]).split("\n")


def setup(app: Sphinx) -> dict[str, Any]:
    """For Sphinx."""
    app.add_directive("cpp-header", CppHeader)
    app.add_directive("cpp-preamble", CppPreamble)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
