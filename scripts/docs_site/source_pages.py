"""Pages of what a page links to and is no page itself: a source file whole, or a folder with what its files own.

Rule: pure functions of paths and texts. These pages are not in the site's search, which is for what was written to be
read.
"""

import ast
import posixpath
from collections.abc import Mapping, Sequence

from . import addresses

LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".toml": "toml",
    ".json": "json",
    ".jsonl": "json",
    ".sh": "sh",
    ".proto": "protobuf",
    ".Dockerfile": "docker",
    ".js": "javascript",
    ".md": "markdown",
}
LARGEST = 400_000
"""Characters; no file is cut, so a link to a larger one is an error of the build."""
HIDDEN = "---\nsearch:\n  exclude: true\nhide:\n  - toc\n---\n"


def file_page(path: str, text: str) -> str:
    """A file, whole."""
    fence = "````" if "```" in text else "```"
    language = LANGUAGES.get(posixpath.splitext(path)[1], "text")
    return f"{HIDDEN}\n# {path}\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"


def folder_page(path: str, files: Mapping[str, str], folders: Sequence[str], linked: frozenset[str]) -> str:
    """A folder: what it holds, each file with the first line of what it says of itself.

    `files`: path to text, of those directly in it; `linked`: which of them have a page.
    """
    own = addresses.address(path, folder=True)
    lines = [f"{HIDDEN}\n# {path}/", ""]
    lines += [f"- `{posixpath.basename(folder)}/`" for folder in sorted(folders)]
    for file in sorted(files):
        name = f"`{posixpath.basename(file)}`"
        if file in linked:
            name = f"[{name}]({addresses.between(own, addresses.address(file))})"
        says = first_line(file, files[file])
        lines.append(f"- {name}{': ' if says else ''}{says}")
    return "\n".join(lines) + "\n"


def first_line(path: str, text: str) -> str:
    """What a Python module or a page says first; empty for others."""
    if path.endswith(".py"):
        says = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0].replace("\n", " ")
        return says.replace("<", "&lt;").replace("[", "\\[").replace("*", "\\*").replace("_", "\\_")
    return ""
