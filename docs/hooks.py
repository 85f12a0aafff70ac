"""What mkdocs builds beside the pages: the table of all settings, and files that pages link to."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from openrlhf.cli.main import COMMANDS, command
from openrlhf.config.base import value_at, walk
from openrlhf.config.cli import Reading

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\((\.\./[^)#\s]+)")
# In a Markdown file of the root: a link to something that has no page.
ELSEWHERE = re.compile(r"\[([^\]]+)\]\((?!docs/|https?:|#)[^)]*\)")
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml"}
WITHOUT_OWN = ("ppo-local", "check")  # have the settings of other commands


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page of all settings, and a page for each file outside docs/ that a page links to."""
    pages = {"reference/settings.md": settings()}
    for file in files.documentation_pages():
        for path in linked_files(Path(file.src_uri), file.content_string):
            pages[f"files/{path}.md"] = file_page(path)
    for uri, text in pages.items():
        if short := files.get_file_from_path(uri):  # what GitHub shows in its place
            files.remove(short)
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files outside docs/ to their pages."""
    here = Path(page.file.src_uri)

    def lead(match: re.Match[str]) -> str:
        path = outside(here, match[1])
        return f"]({os.path.relpath(f'files/{path}.md', here.parent)}" if path else match[0]

    return LINK.sub(lead, markdown)


def outside(page: Path, target: str) -> str | None:
    """Return the path from the root of the repository, or None if the link stays within docs/."""
    path = os.path.normpath(Path("docs") / page.parent / target)
    return None if path.startswith("docs/") else path


def linked_files(page: Path, markdown: str) -> set[str]:
    """Return the files outside docs/ that a page links to."""
    return {path for path in (outside(page, link) for link in LINK.findall(markdown)) if path}


def file_page(path: str) -> str:
    """Return a page that shows a file of the repository."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return ELSEWHERE.sub(r"\1", text).replace("](docs/", "](" + "../" * len(Path(path).parts))
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"# {Path(path).name}\n\n`{path}`\n\n````{language}\n{text}````\n"


def settings() -> str:
    """Return the tables of all settings, a section a command."""
    parts = ["# All settings\n\nThe first name of a setting is its path in a YAML file.\n"]
    for name in COMMANDS:
        if name not in WITHOUT_OWN:
            parts += [f"## openrlhf {name}\n", "| flag | default | meaning |", "|---|---|---|"]
            parts += [*setting_rows(name), ""]
    return "\n".join(parts)


def setting_rows(name: str) -> Iterator[str]:
    """Yield a row for each setting of a command."""
    config_class = command(name).config_class
    defaults = Reading(config_class).build()
    for option in walk(config_class):
        names = dict.fromkeys((option.path, *dict(option.names)))
        flags = "<br>".join(f"`--{name}`" for name in names)
        default = cell(value_at(defaults, option.path))
        yield f"| {flags} | {default} | {option.field.description} |"


def cell(default: object) -> str:
    """Return a default as it is typed; empty if there is none."""
    if default is None or default == "":
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    text = str(default).replace("\n", "\\n")
    return f"`{re.sub(r'-?[0-9]{8}-[0-9]{6}|_?[0-9]{4}T[0-9:]+', 'TIME', text)}`"
