"""The C reference, made from the headers: `.. c-header:: FILE` with the option `sections`, and `.. c-preamble:: FILE`.

Each declaration becomes an entry of Sphinx's C domain, with an anchor, a line in the index and one in the search. All
text is that of the header. What the header says by its rules is looked up there: who must call a function (its comment,
or the paragraph above it, says "Collective" or "Local"), what a parameter means (the list of parameters at the head of
the file, and clauses such as "in: count elements" in a comment), and which errors a function may return.
"""

import functools
import itertools
import re
import textwrap
from typing import Any

import headers
from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from headers import Declaration, Group, Section
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

FILES = ("phalanx.h", "cuda.h", "tuning.h", "random.h", "carrier.h", "device.h", "phalanx_torch.h")
ROLES = {"function": "func", "struct": "struct", "handle": "type", "type": "type", "callback": "type", "macro": "macro"}
CALLED_BY = {
    "collective": "all ranks of the group, in the same order (collective)",
    "local": "one rank; no other rank takes part (local)",
}
_LOCAL = re.compile(r"\b(?:[Nn]ot collective|[Ll]ocal|[Nn]ever (?:communicates|blocks))\b")
_COLLECTIVE = re.compile(r"\bCollective\b|\bAll of these are collective\b|\bThe collectives above with\b")


@functools.cache
def known() -> dict[str, str]:
    """The role of every name that a header declares."""
    roles = {}
    for file in FILES:
        for section in headers.sections(file):
            for declaration in (each for group in section.groups for each in group.declarations):
                roles.update(
                    {member.name: "enumerator" for member in declaration.members if declaration.kind == "enum"}
                )
                if declaration.name:
                    roles[declaration.name] = ROLES[declaration.kind]
    return roles


# ---- text ------------------------------------------------------------------------------------------------------------

_WORD = re.compile(
    r"`(?P<quoted>[^`]+)`|(?P<name>\b(?:phxt?|PHXT?)_\w+)(?P<rest>\*|\.\w+|\(\))?|(?P<code>\*?\b\w+\[[^]\n]*\](?:\.\w+)?|\*\w+\b"
    r"|\b(?:\w+\.)*\w+_\w+(?:\.\w+)*\b|\b\w+\((?=[\w, ]*\))[\w, ]*\)|\bNULL\b|\bin == out\b)|(?P<mark>[*`|_<>\\])"
)


def marked(text: str) -> str:
    """Text of a comment as reStructuredText: names are links, code is set as code."""

    def mark(match: re.Match[str]) -> str:
        if match["mark"]:
            return "\\" + match["mark"]
        name, rest = match["name"] or match["quoted"], (match["rest"] or "").replace("()", "")
        if name in known() and rest != "*":
            set_ = f":c:{known()[name]}:`{name}`" + (rf"\ ``{rest}``" if rest else "")
        else:
            set_ = f"``{match['quoted'] or match['code'] or name + rest}``"
        before, after = text[: match.start()][-1:], text[match.end() :][:1]
        return (
            ("\\ " if re.match(r"[^\s'\"(\[{<\-/:]", before) else "")
            + set_
            + ("\\ " if re.match(r"[^\s'\")\]}>\-/:.,;!?]", after) else "")
        )

    return _WORD.sub(mark, text)


_PARAMETERS = re.compile(r"\*?[a-z_]+(?:, \*?[a-z_]+)*: ")  # an item of the list at the head of a header


def paragraphs(comment: str) -> str:
    """A comment as reStructuredText: paragraphs, lists of "- ", and what is indented otherwise as it stands."""
    blocks = []
    for block in re.split(r"\n[ \t]*\n", comment):
        lines = block.split("\n")
        if re.match(r"\s*- ", lines[0]):
            items = re.split(r"^\s*- ", textwrap.dedent(block), flags=re.MULTILINE)[1:]
            for number, item in enumerate(items):
                names, colon, rest = item.partition(": ")
                if _PARAMETERS.match(item):
                    items[number] = re.sub(r"\*?\w+", r"`\g<0>`", names) + colon + rest
            blocks.append("\n".join(f"- {marked(' '.join(item.split()))}" for item in items))
        elif all(line.startswith("  ") for line in lines):
            blocks.append(literal(block))
        else:
            for is_code, some in itertools.groupby(lines, lambda line: line.startswith("    ")):
                text = "\n".join(some)
                blocks.append(literal(text) if is_code else marked(" ".join(text.split())))
    return "\n\n".join(blocks)


def literal(text: str) -> str:
    """Text that is shown as it stands."""
    return ".. code-block:: text\n\n" + textwrap.indent(textwrap.dedent(text), "   ")


def sentence(text: str) -> str:
    """A note behind a declaration as a sentence."""
    text = " ".join(text.split())
    is_name = re.match(r"[\w.]*[._(\[]\w", text) or re.match(r"in\b|out\b", text)
    return (
        (text[:1] if is_name else text[:1].upper()) + text[1:] + ("" if text.endswith((".", ";")) else ".")
        if text
        else ""
    )


# ---- parameters ------------------------------------------------------------------------------------------------------

_NAMES = r"\*?\w+(?:(?:, | and )\*?\w+)*"


@functools.cache
def meanings(file: str) -> dict[str, str]:
    """What a parameter means in every function: the items "- name, name: text" at the head of the file."""
    found = {} if file == "phalanx.h" else dict(meanings("phalanx.h"))
    head = headers.preamble(file)
    for names, text in re.findall(
        rf"^\s*- ({_NAMES}): ((?:.|\n(?!\s*-|\s*\n))+)", head[head.find("Parameters") :], re.MULTILINE
    ):
        found.update(dict.fromkeys(re.split(r", | and ", names), " ".join(text.split())))
    return found


def parameters(function: Declaration) -> list[tuple[str, str]]:
    """The parameters of a function: name and type."""
    listed = function.text[function.text.index("(") + 1 : function.text.rindex(")")]
    listed = re.sub(r"\(\*(\w+)\)\([^()]*\)", r"(*) \1", listed)  # functions
    pairs = [re.fullmatch(r"(.*?)(\w+)", each.strip()) for each in listed.split(",")]
    return [(pair[2], pair[1].strip()) for pair in pairs if pair and pair[1]]


_CLAUSE = re.compile(rf"({_NAMES})(?:: | (?=(?:NULL|0)(?::| =)))")  # "in and out: ...", "device NULL = ..."
_SENTENCE_END = re.compile(r"(?<=\.)\s+(?=[^a-z(]|[a-z_]+(?:(?:, | and )[a-z_]+)*(?: NULL| 0)?:| *[a-z]+ NULL)")


def _about(clause: str, names: set[str]) -> list[str]:
    """The parameters that a clause is about."""
    match = _CLAUSE.match(clause)
    listed = re.split(r", | and ", match[1].replace("*", "")) if match else []
    return listed if set(listed) <= names else []


def split_comment(comment: str, names: set[str]) -> tuple[str, dict[str, str]]:
    """A comment without its clauses about single parameters, and those."""
    blocks: list[str] = []
    about: dict[str, str] = {}
    for block in re.split(r"\n[ \t]*\n", comment):
        if re.match(r"\s", block) or block.startswith("- "):
            blocks.append(block)
            continue
        kept, last = [], []
        for each in _SENTENCE_END.split(block):
            if not _about(each, names):
                kept.append(each)
                continue
            for clause in re.split(r";\s+", each):
                if found := _about(clause, names):
                    last, clause = found, clause[_CLAUSE.match(clause).end() :]  # type: ignore[union-attr]
                about.update({name: f"{about[name]}; {clause}" if name in about else clause for name in last})
        blocks.append(" ".join(kept))
    return "\n\n".join(filter(None, blocks)), about


def parameter_lines(functions: list[Declaration], about: dict[str, str], file: str) -> list[str]:
    lines = []
    for name, type_ in dict(pair for function in functions for pair in parameters(function)).items():
        is_result = type_.endswith("**") or type_ in ("size_t *", "int64_t *", "uint16_t *", "int32_t *", "uint64_t *")
        general = meanings(file).get(f"*{name}" if is_result else name, "")
        own = about.get(name, "")
        own = "" if own.startswith("NULL =") and "NULL" in general else own
        text = f"{general.rstrip('.')}; {own}" if own.startswith(("NULL", "0")) and general else own or general
        lines.append(f":param {name}: {marked(' '.join(sentence(text).split()))}")
    return lines


# ---- functions -------------------------------------------------------------------------------------------------------


def called_by(text: str, default: str) -> str:
    """Whether a function is collective or local, by its comment or else by the paragraph above."""
    if re.search(r"[Nn]ot collective", text):
        return "local"
    if _COLLECTIVE.search(text):
        return "collective"
    return "local" if _LOCAL.search(text) else default


def error_line(functions: list[Declaration], comment: str) -> str:
    if not any(function.text.startswith("phx_status ") for function in functions):
        return ""
    own = list(dict.fromkeys(re.findall(r"\bPHX_ERR_[A-Z_]+\b", comment)))
    names = {name for function in functions for name, _ in parameters(function)}
    common = ["every function"]
    if names & {"group", "symm", "window"}:
        common.append("calls on a group")
    if names & {"timeout_ms", "options"}:
        common.append("calls that wait")
    said = ", ".join(marked(name) for name in own)
    rest = f"those of :ref:`{' and of '.join(common)} <c-errors>`"
    return f":Errors: {said + '; and ' if said else ''}{rest}."


def function_entry(group: Group, functions: list[Declaration], file: str, default: str) -> list[str]:
    text = " ".join([group.comment, *(sentence(each.comment) for each in functions)]).strip()
    # Notes behind a declaration begin with a small letter: "local", "static", "one more release is needed".
    names = {name for function in functions for name, _ in parameters(function)}
    body, about = split_comment(text, names)
    lines = [f".. c:function:: {functions[0].text}"]
    lines += [f"                {each.text}" for each in functions[1:]]
    content = [paragraphs(body), ""] if body else []
    content += parameter_lines(functions, about, file)
    content += (
        [f":Called by: {CALLED_BY.get(called_by(text, default), default)}."] if default or called_by(text, "") else []
    )
    content += filter(None, [error_line(functions, text)])
    return [*lines, "", *textwrap.indent("\n".join(content), "   ").split("\n"), ""]


# ---- other declarations ----------------------------------------------------------------------------------------------


def _entry(directive: str, text: str, content: str) -> list[str]:
    return [f".. c:{directive}:: {text}", "", *textwrap.indent(content, "   ").split("\n"), ""]


def member_lines(directive: str, declaration: Declaration) -> list[str]:
    """The constants or the fields of a declaration; those in a row that have no comment, as one entry."""
    lines: list[str] = []
    for commented, members in itertools.groupby(declaration.members, lambda member: member.comment or None):
        note = commented or ("" if len(declaration.members) > 1 else declaration.comment)
        texts = [member.declaration for member in members]
        lines += _entry(directive, ("\n" + " " * (len(directive) + 8)).join(texts), marked(sentence(note)))
    return lines


def other_entry(group: Group, declaration: Declaration, has_comment: bool, section: Section) -> list[str]:
    said = paragraphs(group.comment) if has_comment else ""
    said = "\n\n".join(
        filter(None, [said, marked(sentence(declaration.comment)) if declaration.kind != "enum" else ""])
    )
    if declaration.kind == "enum":
        constants = member_lines("enumerator", declaration)
        return [said, "", *constants] if said else constants
    if declaration.kind == "struct":
        fields = member_lines("member", declaration)
        macro = f"{declaration.name.upper()}_INIT"
        if macro in known():
            said = f"{said}\n\nInitialized by :c:macro:`{macro}`.".strip()
        return _entry("struct", declaration.name, said + "\n\n" + "\n".join(fields))
    if declaration.kind == "macro":
        initialized = re.fullmatch(r"(PHX_\w+)_INIT", declaration.name)
        what = (
            f"The initializer of :c:struct:`{initialized[1].lower()}`: ``{declaration.text}``."
            if initialized
            else f"``{declaration.text}``"
        )
        return _entry("macro", declaration.name, f"{said}\n\n{what}".strip())
    if declaration.kind == "callback" and not said:
        users = [each.name for each in group.declarations if each.kind == "function"]
        said = f"The type of the function that {' and '.join(f':c:func:`{user}`' for user in users)} takes."
    return _entry("type", declaration.text, said)


def section_lines(section: Section, file: str) -> list[str]:
    lines: list[str] = []
    default = "" if file == "device.h" else "collective" if section.title.startswith("collectives") else "local"
    for group in section.groups:
        if not group.declarations:
            default = called_by(group.comment, default)
            lines += [paragraphs(group.comment), ""]
            continue
        functions = [each for each in group.declarations if each.kind == "function"]
        others = [
            each
            for each in group.declarations
            if each.kind != "function" and not (each.kind == "handle" and known()[each.name] == "struct")
        ]
        with_comment = (
            None
            if functions
            else next((each for each in others if each.kind in ("struct", "callback")), others[0] if others else None)
        )
        for each in others:
            lines += other_entry(group, each, each is with_comment, section)
        if functions:
            lines += function_entry(group, functions, file, default)
    return lines


# ---- directives ------------------------------------------------------------------------------------------------------


class FromHeader(SphinxDirective):
    """A directive whose text is made from a header."""

    required_arguments = 1

    def lines(self, file: str) -> list[str]:
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        file = self.arguments[0] if self.arguments else "phalanx.hpp"
        path = headers.path_of(file)
        self.env.note_dependency(__file__)
        self.env.note_dependency(str(path))
        content = StringList("\n".join(self.lines(file)).split("\n"), source=str(path))
        return self.parse_content_to_nodes_of(content)

    def parse_content_to_nodes_of(self, content: StringList) -> list[nodes.Node]:
        node = nodes.section()
        node.document = self.state.document
        self.state.nested_parse(content, self.content_offset, node, match_titles=1)
        return node.children


class CHeader(FromHeader):
    """The declarations of a header, or of the sections of it that are named."""

    option_spec = {"sections": directives.unchanged}  # noqa: RUF012

    def lines(self, file: str) -> list[str]:
        wanted = [each.strip() for each in self.options.get("sections", "").split(",") if each.strip()]
        there = {section.title: section for section in headers.sections(file)}
        missing = set(wanted) - set(there)
        if missing:
            raise self.error(f"{file} has no section {', '.join(sorted(missing))}; it has {', '.join(there)}")
        return [line for title in wanted or there for line in section_lines(there[title], file)]


class CPreamble(FromHeader):
    """The comment with which a header begins, without its first paragraph if the option `skip` is given."""

    option_spec = {"skip": directives.flag}  # noqa: RUF012

    def lines(self, file: str) -> list[str]:
        head = headers.preamble(file)
        said = paragraphs(head.partition("\n\n")[2] if "skip" in self.options else head)
        return said.replace(
            "Errors that every function may", ".. _c-errors:\n\nErrors that every function may", 1
        ).split("\n")


def setup(app: Sphinx) -> dict[str, Any]:
    """For Sphinx."""
    app.add_directive("c-header", CHeader)
    app.add_directive("c-preamble", CPreamble)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
