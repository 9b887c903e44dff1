"""docs/models.md names what tests/clients/test_architectures.py trains."""

import importlib.util
from pathlib import Path

from support.architectures import ARCHITECTURES

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("make_models", ROOT / "docs" / "make_models.py")
make_models = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_models)


def test_the_page_is_current():
    page = make_models.PAGE.read_text()
    assert page == make_models.render(page), "run python docs/make_models.py"


def test_there_are_enough():
    assert sum(not a.fails for a in ARCHITECTURES.values()) >= 40
