"""The shell commands of Markdown pages: of fenced and of indented blocks, as the words that a shell passes on."""

import dataclasses
import pathlib
import re
import shlex

ROOT = pathlib.Path(__file__).parent.parent.parent
SHELLS = ("", "sh", "bash", "shell", "console")
JOINTS = ("&&", "||", ";", "|", "&")
KEYWORDS = ("do", "done", "then", "fi")
INLINE = re.compile(r"(?<!`)`(jaxscale [a-z][^`\n]*)`(?!`)")


@dataclasses.dataclass(frozen=True)
class Block:
    """Lines that a page sets apart."""

    page: str  # relative to the repository
    line: int  # of its first
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Command:
    """One command, without what joined it to the next."""

    page: str
    line: int
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        """Its words, without the quotes that a shell needs."""
        return " ".join(self.words)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def pages() -> list[pathlib.Path]:
    """Those whose commands are promised to be right."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(page: str, text: str) -> list[Block]:
    """Every fenced block without a language or with a shell's, and every indented one."""
    found, lines, place, margin = [], text.split("\n"), 0, 4
    while place < len(lines):
        if lines[place][:1].strip():  # 4 spaces continue a list item, 8 are code in it
            margin = 8 if re.match(r"(\d+\.|[-*]) ", lines[place]) else 4
        code = " " * margin
        fence = re.match(r"^( *)(`{3,}|~{3,})(\w*)", lines[place])
        if fence:
            end = next(i for i in range(place + 1, len(lines)) if lines[i].lstrip().startswith(fence[2]))
            if fence[3] in SHELLS:
                found.append(Block(page, place + 2, dedented(lines[place + 1 : end])))
            place = end + 1
        elif lines[place].startswith(code) and (place == 0 or not lines[place - 1].strip()):
            end = place
            while end < len(lines) and (lines[end].startswith(code) or goes_on(lines, end, code)):
                end += 1
            found.append(Block(page, place + 1, dedented(lines[place:end])))
            place = end
        else:
            place += 1
    return found


def goes_on(lines: list[str], place: int, code: str) -> bool:
    """Whether an empty line is within a block indented by `code`, as Markdown has it."""
    after = next((line for line in lines[place:] if line.strip()), "")
    return not lines[place].strip() and after.startswith(code)


def dedented(lines: list[str]) -> tuple[str, ...]:
    """Without the spaces that all lines begin with."""
    least = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return tuple(line[least:] for line in lines)


def commands_of(block: Block) -> list[Command]:
    """The commands of a block of shell: lines that end in a backslash joined, loops taken once, comments left out."""
    found, value, place = [], {}, 0
    while place < len(block.lines):
        start, line = place, block.lines[place]
        while line.split("#")[0].rstrip().endswith("\\") and place + 1 < len(block.lines):
            place += 1
            line = line.rstrip()[:-1] + " " + block.lines[place].strip()
        place += 1
        for name, first in value.items():
            line = line.replace(f"${name}", first)
        for words in split(line):
            if words[0] == "for":  # for NAME in FIRST ...
                value[words[1]] = words[3]
            else:
                found.append(Command(block.page, block.line + start, tuple(words)))
    return found


def split(line: str) -> list[list[str]]:
    """The words of each command in a line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
    lexer.whitespace_split = True
    lexer.commenters = ""
    commands, words, to_file = [], [], False
    for word in lexer:
        if to_file or word == ">":  # and the name of the file behind it
            to_file = not to_file
            continue
        if word.startswith("#"):
            break
        if word in JOINTS:
            commands, words = [*commands, words], []
        elif words or word not in KEYWORDS:
            words.append(word)
    return [words for words in [*commands, words] if words]


def inline_of(page: str, text: str) -> list[Command]:
    """`jaxscale VERB ...` within sentences, where it is a whole command and no list of them."""
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.startswith("    "):
            spans = [span for span in INLINE.findall(line) if " | " not in span and "VERB" not in span]
            found += [Command(page, number, tuple(words)) for span in spans for words in split(span)]
    return found
