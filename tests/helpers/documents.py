"""The documents: their fenced blocks, and the commands in them."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.source import ROOT

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Nothing is on the PATH, so every program ends here; `cat` writes the files that commands use.
SHELL = r"""
command_not_found_handle() {
  if [ "$1" = cat ]; then while IFS= read -r line; do printf '%s\n' "$line"; done; return; fi
  printf '%s\0' "$@" $'\x1e' >> "$RECORD"
}
source() { :; }
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    path: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def blocks(language: str, document: Path | None = None) -> list[Block]:
    """All blocks of a language, in every document or in one."""
    return [
        Block(path, text[: match.start()].count("\n") + 1, match[1], match[2])
        for path in ([document] if document else DOCUMENTS)
        for text in [path.read_text()]
        for match in FENCE.finditer(text)
        if match[1] == language
    ]


def named(block: Block) -> str | None:
    """`reward.py` of a block whose first line is `# reward.py`."""
    found = re.match(r"# ([\w.-]+\.(?:py|yaml))\n", block.text)
    return found[1] if found else None


def commands(block: Block, folder: Path) -> list[list[str]]:
    """The words of every command of a bash block; here-documents are written into the folder."""
    record = folder / "record"
    record.write_bytes(b"")
    bash = shutil.which("bash")
    assert bash is not None, "these tests need bash"
    result = subprocess.run(
        [bash, "--noprofile", "--norc", "-c", SHELL + block.text],
        env={"PATH": "/nonexistent", "RECORD": str(record)},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr) == (0, ""), block.where
    lines = record.read_text().split("\x1e\0")
    return [line.removesuffix("\0").split("\0") for line in lines if line]


def save_files(folder: Path) -> None:
    """Write the files that the documents show, beside the examples of a checkout."""
    (folder / "examples").symlink_to(ROOT / "examples")
    for block in [*blocks("python"), *blocks("yaml")]:
        if name := named(block):
            (folder / name).write_text(block.text)
