"""Writes the two tables of docs/settings.md: ``python docs/make_settings.py`` (from anywhere).

The table between the ``<!-- keys -->`` markers comes from the fields of `CyclicConfig`, the one between the ``<!-- settings -->``
markers from `deepspeed_cdp.integration.support`. tests/unit/test_docs_numbers.py checks that the page is current.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "settings.md"


def keys() -> str:
    """A line per key of the `cyclic` block."""
    from deepspeed_cdp.integration.config import KEYS, CyclicConfig

    lines = ["| key | default | meaning | allowed |", "|---|---|---|---|"]
    for name, field in CyclicConfig.model_fields.items():
        value = f"{field.default:g}" if isinstance(field.default, float) else json.dumps(field.default)
        default = "(required)" if name == "enabled" else f"`{value}`"
        allowed = re.sub(r'"[^"]*"|\b(true|false|null)\b', r"`\g<0>`", KEYS[name].allowed)
        lines.append(f"| `{name}` | {default} | {field.description} | {allowed} |")
    return "\n".join(lines)


def render(text: str) -> str:
    """The page with both tables made anew."""
    from deepspeed_cdp.integration.support import as_markdown

    for marker, made in (("keys", keys()), ("settings", as_markdown().strip())):
        line = f"<!-- {marker} -->"
        before, _, after = text.split(line)
        text = f"{before}{line}\n{made}\n{line}{after}"
    return text


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(render(PAGE.read_text()))
