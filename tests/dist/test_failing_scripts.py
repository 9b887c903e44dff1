"""Scripts that an error ends: the sentence is the last line, and the exit code is 1, on every rank and every path."""

import pytest

from support.processes import both_ranks

# how, who -> words of the last line of a rank that fails
SHORT = {
    ("no optimizer", "all"): "ValueError: optimizer is missing",
    ("criterion", "1"): "ValueError: optimizer has parameters of no module of the model",
    ("backward", "0"): "RuntimeError: own error in backward",
}
LONG = {
    ("units", "all"): "ValueError: cyclic.units has 'blocks.9'",
    ("criterion", "all"): "ValueError: optimizer has parameters of no module of the model",
    ("scheduler", "all"): "AssertionError: DeepSpeed does not recognize LR scheduler Nothing",
    ("forward", "1"): "RuntimeError: own error in forward",
    ("script", "0"): "RuntimeError: own error in script",
    ("twice", "1"): "ValueError: a backward of step 3 came without a training forward of its own",
    ("module", "all"): "ValueError: the module itself was called",
}


def check(how: str, who: str, words: str) -> None:
    told = 0
    for number, done in enumerate(both_ranks("failing_script", how, who, seconds=120)):
        last = done.stdout.rstrip().splitlines()[-1]
        assert done.returncode == 1, (number, done.returncode, done.stdout[-3000:])
        fails = who in ("all", str(number))
        # where all fail in training, the peer may be gone before this rank comes to its own error
        gone = how == "module" and "HandoffError: " in last and "closed the connection" in last
        assert (words if fails else "HandoffError: ") in last or gone, (number, done.stdout[-3000:])
        told += words in last
    assert told


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("how", "who"), SHORT)
def test_the_sentence_is_last_and_the_exit_code_1(operators, how, who):
    check(how, who, SHORT[how, who])


@pytest.mark.slow
@pytest.mark.parametrize(("how", "who"), LONG)
def test_other_paths_end_so_too(operators, how, who):
    check(how, who, LONG[how, who])
