"""Writes docs/cyclic.schema.json, the JSON schema of the ``cyclic`` block: ``python docs/make_schema.py`` (from anywhere).

It is made from the pydantic model `CyclicConfig`; tests/unit/test_config.py checks that the file is current.
"""

import json
from pathlib import Path

from deepspeed_cdp.integration.config import CyclicConfig

FILE = Path(__file__).with_name("cyclic.schema.json")


def render() -> str:
    """The file's text."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **CyclicConfig.model_json_schema()}
    return json.dumps(schema, indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(render())
