"""docs/errors.md is what docs/make_errors.py writes today, and the messages that users meet are in it."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from deepspeed_cdp.integration.config import parse_cyclic
from deepspeed_cdp.plan.partition import contiguous
from deepspeed_cdp.plan.schedule import threshold

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("make_errors", ROOT / "docs" / "make_errors.py")
make_errors = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_errors)

# Their callers handle them: errors of Python's own protocols, of a reader that files.load_archive wraps, and of a trace.
NOT_LISTED = {"AttributeError", "ArgumentTypeError", "NotPlainError", "UnknownNamesError", "NoAnswer", "UnknownValueError"}


@pytest.fixture(scope="module")
def catalogue():
    return make_errors.Catalogue()


@pytest.fixture(scope="module")
def entries(catalogue):
    return catalogue.entries()


def test_the_page_is_current(entries):
    assert make_errors.PAGE.read_text() == make_errors.render(entries), "run python docs/make_errors.py"


def test_every_folder_of_the_package_with_errors_has_a_section(entries):
    assert {module.split(".")[1] for module, _, _ in entries} == set(make_errors.FOLDERS)


def test_every_class_that_is_raised_is_explained(catalogue):
    raised = {
        make_errors._called(node.exc)
        for module in catalogue.modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    }
    classes = {name for name in raised if name[0].isupper()}
    assert classes - NOT_LISTED == set(make_errors.CLASSES)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: threshold("cdp-v3", 4),
        lambda: contiguous([1, 1], 3),
        lambda: parse_cyclic({"cyclic": {"enabled": True, "transport": "pigeon"}}),
        lambda: parse_cyclic({"cyclic": {"enabled": True, "rules": "dp"}}),
    ],
)
def test_a_message_matches_its_entry(wrong, entries):
    with pytest.raises(ValueError) as caught:
        wrong()
    texts = [text for _, kind, text in entries if kind == "ValueError" and re.sub(r"\{.*?\}", "", text).strip()]
    patterns = [".*?".join(map(re.escape, re.split(r"\{.*?\}", text))) for text in texts]
    assert any(re.fullmatch(pattern, str(caught.value), re.DOTALL) for pattern in patterns), str(caught.value)


def test_helpers_branches_and_constants_are_followed(tmp_path):
    folder = tmp_path / "package" / "transport"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text(
        "APART = 'someone is late'\n"
        "class T:\n"
        "    def refuse(self, what):\n"
        "        return ValueError(f'{what} is refused; do not')\n"
        "    def call(self, n):\n"
        "        why = 'too large' if n > 3 else 'too small'\n"
        "        if n:\n"
        "            raise HandoffError(f'rank {self.rank}: {n!r} is {why} ({APART})')\n"
        "        raise self.refuse('a call')\n"
        "class U:\n"
        "    def call(self):\n"
        "        self.ticket.fail(f'stream {self.name} has closed')\n"
    )
    assert make_errors.Catalogue(tmp_path / "package").entries() == [
        ("package.transport.a", "HandoffError", "rank {rank}: {n} is too large (someone is late)"),
        ("package.transport.a", "HandoffError", "rank {rank}: {n} is too small (someone is late)"),
        ("package.transport.a", "ValueError", "a call is refused; do not"),
        ("package.transport.a", "HandoffError", "stream {name} has closed"),
    ]
