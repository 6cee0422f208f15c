"""What mkdocs must know about this repository: pages outside `docs/`, and lists in the navigation.

Pages link to files outside `docs/` by relative paths, which GitHub shows as they are. The site
holds a copy of every file that is linked so: Markdown and programs as pages, folders as lists.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {".py": "python", ".sh": "bash", ".toml": "toml", ".yaml": "yaml"}
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)]*)?\))")
_FENCE = re.compile(r"^ *(```+|~~~+)")


def on_config(config: Any) -> Any:
    """Replace entries such as `decisions/*` by the pages of that folder."""
    config.nav = _expanded(config.nav)
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add what the navigation names or pages link to outside `docs/`."""
    named = _named(config.nav)
    waiting = [path for path in named if not (ROOT / "docs" / path).exists()]
    waiting += [
        target
        for file in files.documentation_pages()
        for target in _targets(f"docs/{file.src_uri}", file.content_string)
    ]
    while waiting:
        path = waiting.pop()
        if _is_outside(path) and files.get_file_from_path(uri_of(path)) is None:
            text = text_of(path)
            level = InclusionLevel.INCLUDED if path in named else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, uri_of(path), content=text, inclusion=level))
            if uri_of(path).endswith(".md") and isinstance(text, str):
                waiting += _targets(_place(path), text)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make links point to where the site has the files."""
    here = page.file.src_uri
    place = here if page.file.generated_by else f"docs/{here}"

    def moved(path: str) -> str:
        return posixpath.relpath(uri_of(path), posixpath.dirname(here) or ".")

    return _relinked(markdown, place, moved)


def uri_of(path: str) -> str:
    """Where the site has a file or folder of the repository.

    >>> uri_of("docs/plans.md"), uri_of("README.md"), uri_of("examples/grpo/grpo.py")
    ('plans.md', 'index.md', 'examples/grpo/grpo.py.md')
    """
    if path == "README.md":
        return "index.md"
    if (ROOT / path).is_dir():
        path = f"{path}/README.md"
    path = path.removeprefix("docs/")
    return f"{path}.md" if Path(path).suffix in PROGRAMS else path


def text_of(path: str) -> str | bytes:
    """What the site shows for a file or folder outside `docs/`."""
    whole = ROOT / path
    if whole.is_dir() and not (whole / "README.md").exists():
        inside = sorted(each.name for each in whole.iterdir() if each.suffix == ".md")
        return f"# {path}\n\n" + "\n".join(f"- [{name}]({name})" for name in inside) + "\n"
    if whole.is_dir():
        return (whole / "README.md").read_text("utf-8")
    if whole.suffix in PROGRAMS:
        code = whole.read_text("utf-8")
        return f"# {path}\n\n~~~~~{PROGRAMS[whole.suffix]}\n{code}~~~~~\n"
    return whole.read_text("utf-8") if whole.suffix == ".md" else whole.read_bytes()


def _place(path: str) -> str:
    """The path that links in a page are relative to."""
    return f"{path}/README.md" if (ROOT / path).is_dir() else path


def _is_outside(path: str) -> bool:
    return (ROOT / path).exists() and not f"{path}/".startswith("docs/")


def _targets(place: str, text: str) -> list[str]:
    """The files of the repository that a page links to."""
    found: list[str] = []

    def seen(path: str) -> str:
        found.append(path)
        return path

    _relinked(text, place, seen)
    return found


def _relinked(text: str, place: str, moved: Callable[[str], str]) -> str:
    """A page at `place` whose links to files of the repository are changed, outside of code."""

    def link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(place), match[2]))
        if "://" in match[2] or path.startswith("..") or not (ROOT / path).exists():
            return match[0]
        return f"{match[1]}{moved(path)}{match[3]}"

    lines, fence = [], ""
    for line in text.splitlines(keepends=True):
        mark = _FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence):
            fence = ""
        lines.append(line if fence or mark else _LINK.sub(link, line))
    return "".join(lines)


def _expanded(entry: Any) -> Any:
    if isinstance(entry, list):
        inner = [_expanded(each) for each in entry]
        return [one for each in inner for one in (each if isinstance(each, list) else [each])]
    if isinstance(entry, dict):
        return {title: _expanded(inner) for title, inner in entry.items()}
    if isinstance(entry, str) and entry.endswith("/*"):
        folder = ROOT / "docs" / entry[:-2]
        names = sorted(path.stem for path in folder.glob("*.md") if path.name != "README.md")
        return [f"{entry[:-1]}{name}.md" for name in names]
    return entry


def _named(entry: Any) -> list[str]:
    """All paths of the navigation."""
    if isinstance(entry, str):
        return [entry]
    inner = entry.values() if isinstance(entry, dict) else entry
    return [path for each in inner for path in _named(each)]
