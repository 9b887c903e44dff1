"""Comparison of ranks' settings as plain data: nan equals nan, and the sentence names a setting that does differ."""

import pickle
from typing import Any

import pytest

from deepspeed_cdp.integration import agreement
from deepspeed_cdp.optim.options import same

NAN = float("nan")


def copied(value: Any) -> Any:
    """As another rank has it: equal, and no part is the same object."""
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("value", [NAN, [1.0, NAN], (NAN,), {"scale": NAN, "window": [NAN, 2]}, float("inf"), None, "nan"])
def test_a_value_is_the_same_as_its_copy(value):
    assert same(value, copied(value))
    everyone = [{"gradient_clipping": value}, {"gradient_clipping": copied(value)}]
    assert agreement.first_difference(everyone, 1) is None


@pytest.mark.parametrize(
    "a, b",
    [
        (NAN, 1.0),
        (NAN, None),
        (NAN, "nan"),
        ([NAN], [NAN, NAN]),
        ([1], (1,)),
        ({"a": NAN}, {"b": NAN}),
        (float("inf"), -float("inf")),
    ],
)
def test_other_values_are_not_the_same(a, b):
    assert not same(a, b) and not same(b, a)
    found = agreement.first_difference([{"eps": NAN, "x": a}, {"eps": copied(NAN), "x": b}], 0)
    assert found == agreement.Difference("x", 0, 1)


def test_details_with_nan_name_what_differs():
    everyone = [{"eps of group 0": NAN, "lr of group 0": 1.0}, {"eps of group 0": copied(NAN), "lr of group 0": 2.0}]
    text = agreement.detailed_sentence(agreement.Difference("options", 0, 1), everyone)
    assert text.startswith("options: 'lr of group 0' is 1.0 on rank 0 but 2.0 on rank 1; ")
