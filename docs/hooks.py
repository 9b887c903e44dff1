"""For mkdocs: README.md is the home page, and what it and the pages link to must exist.

In the repository links are paths. A link to a page becomes a link within the site. A link to another file becomes its text, since
the site does not hold that file. A link to nothing is a warning, so a strict build fails.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File

log = get_plugin_logger("links")
_LINK = re.compile(r"(?<!!)\[((?:`[^`]*`|[^\[\]`])+)\]\((?!https?://|mailto:)([^()\s#]+)(#[^()\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    readme = Path(config.config_file_path).parent / "README.md"
    files.append(File.generated(config, "index.md", content=readme.read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    root, docs = Path(config.config_file_path).parent, Path(config.docs_dir)
    here = (docs / page.file.src_uri).parent
    base = root if page.file.src_uri == "index.md" else here

    def within_the_site(match: re.Match[str]) -> str:
        text, path, anchor = match[1], match[2], match[3] or ""
        target = Path(os.path.normpath(base / path))
        if not target.exists():
            log.warning("%s links to %s, which is not there", page.file.src_uri if base == here else "README.md", path)
            return match[0]
        if target == root / "README.md":
            target = docs / "index.md"
        elif target.is_dir() and docs in target.parents and (first := sorted(target.glob("*.md"))):
            target = first[0]
        if docs not in target.parents:
            return text
        return f"[{text}]({os.path.relpath(target, here)}{anchor})"

    return _LINK.sub(within_the_site, markdown).replace("](docs/images/", "](images/")
