"""Reads the public headers: sections, declarations, and the comment that belongs to each.

A comment right above a declaration, or behind it on its line, is about that declaration and about those that follow it
without a blank line or a comment between. A comment with a blank line after it is a paragraph of its section.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

INCLUDE = Path(__file__).resolve().parents[2] / "core" / "include" / "phalanx"
TORCH = INCLUDE.parents[1] / "torch" / "phalanx_torch.h"

_SECTION = re.compile(r"-{4,} (.+?) -{4,}")
_COMMENT = re.compile(r"/\*(.*?)\*/|((?://[^\n]*\n[ \t]*)+)", re.DOTALL)
_OPENING = {"{": "}", "(": ")", "[": "]"}


@dataclass
class Member:
    """A field of a struct or a constant of an enumeration."""

    name: str
    declaration: str
    comment: str = ""


@dataclass
class Declaration:
    """One declaration, on one line, without what is only for the compiler."""

    kind: str  # function, struct, handle, type, callback, enum, macro
    name: str
    text: str
    comment: str = ""  # behind it
    members: list[Member] = field(default_factory=list)
    body: str = ""  # of a function that the header defines


@dataclass
class Group:
    """Declarations that have one comment; or, without any, a paragraph."""

    comment: str
    declarations: list[Declaration] = field(default_factory=list)


@dataclass
class Section:
    """A part of a header, between two comments with lines of hyphens."""

    title: str
    groups: list[Group] = field(default_factory=list)


def path_of(name: str) -> Path:
    """The file of a header, by the name with which a program includes it."""
    return TORCH if name == "phalanx_torch.h" else INCLUDE / name.removeprefix("phalanx/")


def comment_text(comment: str) -> str:
    """What a comment says, without its marks."""
    comment = comment.removeprefix("/*").removesuffix("*/")
    lines = [
        re.sub(r"^\s*(?:\*|//) ?", "", line) if number or "//" in line else line.strip()
        for number, line in enumerate(comment.split("\n"))
    ]
    return "\n".join(line.rstrip() for line in lines).strip()


def preamble(name: str) -> str:
    """The comment with which a header begins."""
    match = _COMMENT.match(path_of(name).read_text())
    assert match, name
    return comment_text(match.group())


def end_of(text: str, at: int) -> int:
    """The end of the declaration that begins at `at`: behind its semicolon, or behind the body of its function."""
    closing: list[str] = []
    while at < len(text):
        comment = _COMMENT.match(text, at)
        if comment:
            at = comment.end()
            continue
        letter = text[at]
        if letter in _OPENING:
            closing.append(_OPENING[letter])
        elif closing and letter == closing[-1]:
            closing.pop()
            if letter == "}" and not closing and not re.match(r"\s*\w*\s*[;,]", text[at + 1 :]):
                return at + 1
        elif letter == ";" and not closing:
            return at + 1
        at += 1
    return at


def flat(code: str) -> str:
    """Code on one line, without comments."""
    return re.sub(r"\s+", " ", _COMMENT.sub(" ", code)).strip()


def _members(body: str, separator: str) -> list[Member]:
    """The fields of a struct (`;`) or the constants of an enumeration (`,`), each with its comments."""
    members: list[Member] = []
    above, at = "", 0
    while at < len(body):
        comment = _COMMENT.match(body, at)
        if comment:
            line = body[body.rfind("\n", 0, at) + 1 : at]
            text = comment_text(comment.group())
            if line.strip() and members:  # behind a member
                members[-1].comment = f"{members[-1].comment} {text}".strip()
            else:
                above = text
            at = comment.end()
        elif body[at].isspace() or body[at] == separator:
            at += 1
        else:
            depth, end = 0, at
            while (
                end < len(body)
                and (depth or body[end] != separator)
                and not (depth == 0 and body[end : end + 2] == "/*")
            ):
                depth += {"(": 1, ")": -1}.get(body[end], 0)
                end += 1
            declaration = flat(body[at:end])
            name = re.search(r"\(\*(\w+)\)|(\w+)(?= =|\[[^]]*\]$|$)", declaration)
            assert name, declaration
            # A field without a comment of its own, right below one that has it, shares it.
            members.append(Member(name[1] or name[2], declaration, above))
            above, at = "", end
    return members


def _declaration(code: str) -> Declaration | None:
    if code.startswith("#"):
        match = re.match(r"#\s*define (\w+)(?:\(.*?\))?\s*(.*)", code.replace("\\\n", " "), re.DOTALL)
        if not match or "private" in match[1].lower() or match[1] in ("PHX_API", "PHX_FN"):
            return None
        comment = _COMMENT.search(match[2])
        return Declaration("macro", match[1], flat(match[2]), comment_text(comment.group()) if comment else "")
    line = flat(code)
    brace = code.find("{")
    if re.match(r"enum\b", line):
        return Declaration("enum", "", "", members=_members(code[brace + 1 : code.rfind("}")], ","))
    struct = re.match(r"(?:typedef )?struct (\w+)", line)
    if struct and brace >= 0:
        return Declaration("struct", struct[1], "", members=_members(code[brace + 1 : code.rfind("}")], ";"))
    if struct and line.startswith("typedef struct") and "(" not in line:
        return Declaration("handle", struct[1], struct[1])
    if line.startswith("typedef"):
        text = line.removeprefix("typedef ").removesuffix(";")
        pointer = re.search(r"\(\*(\w+)\)", text)
        return Declaration("callback" if pointer else "type", pointer[1] if pointer else text.split()[-1], text)
    text = re.sub(r"^(PHX_API|PHX_FN) ", "", line.partition("{")[0]).strip().removesuffix(";")
    name = re.search(r"(\w+)\(", text)
    if not name or not line.startswith(("PHX_API", "PHX_FN")) or "_private_" in name[1]:
        return None
    return Declaration("function", name[1], text, body=code[brace:] if brace >= 0 else "")


def sections(name: str) -> list[Section]:
    """What a header declares, section by section."""
    text = path_of(name).read_text()
    text = text[[*re.finditer(r"^#\s*include.*\n", text, re.MULTILINE)][-1].end() :]
    text = re.sub(r'#ifdef __cplusplus\n(extern "C" \{|\})\n#endif\n|/\* cdef: (begin|end) \*/\n', "", text)
    found, at = [Section("head")], 0
    above, joins = "", False  # the comment above, and whether what comes next belongs to the group before
    while at < len(text):
        space = re.compile(r"[ \t]*(\n[ \t]*)*").match(text, at)
        assert space
        breaks, at = space.group().count("\n"), space.end()
        if at >= len(text):
            break
        groups = found[-1].groups
        comment = _COMMENT.match(text, at)
        if breaks > 1:
            if above:
                groups.append(Group(above))
            above, joins = "", False
        if comment:
            at = comment.end()
            said = comment_text(comment.group())
            section = _SECTION.match(said)
            if section:
                found.append(Section(section[1]))
                above, joins = "", False
            elif breaks == 0 and groups and groups[-1].declarations and not above:  # behind a declaration
                groups[-1].declarations[-1].comment = said
                if len(groups[-1].declarations) > 1:  # it is about this one alone
                    groups.append(Group("", [groups[-1].declarations.pop()]))
            else:
                above, joins = f"{above}\n\n{said}".strip(), False
            continue
        line = re.compile(r"#(?:[^\n]*\\\n)*[^\n]*").match(text, at)
        end = line.end() if line else end_of(text, at)
        declaration = _declaration(text[at:end].strip()) if end > at else None
        at = max(end, at + 1)
        if declaration is None:
            above, joins = "", False
        elif joins and not above and breaks == 1 and not groups[-1].declarations[-1].comment:
            groups[-1].declarations.append(declaration)
        else:
            groups.append(Group(above, [declaration]))
            above, joins = "", True
    return [section for section in found if section.groups]
