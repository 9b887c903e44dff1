"""Samples of unlike lengths, as instruction data has them: the same for every engine.

Lengths are log-normal, rounded up to a 64th of the longest that is allowed, and cut there. What rank r gets in micro-batch m of
step t depends on (seed, r, t, m) only, so all engines compute the same. There are two ways to fill a micro-batch:

- Unpacked: ``count`` samples, padded on the right to the longest of them.
- Packed: one row of samples one after the other, at most ``longest`` tokens: samples are drawn in turn, and those that do not
  fit are left out. ``position_ids`` start anew with each sample, from which Hugging Face's models see where one ends.
"""

import itertools
import math
import random
from collections.abc import Iterable
from typing import NamedTuple

STEPS = 64  # lengths are multiples of the longest by this
MISSES = 8  # a pack is finished when so many samples did not fit


class Lengths(NamedTuple):
    """A distribution of lengths, in tokens; ``seed`` chooses the draws."""

    median: float
    sigma: float
    longest: int
    packed: bool = False
    seed: int = 0

    @property
    def multiple(self) -> int:
        """All lengths are multiples of this, so that there are few shapes."""
        return max(self.longest // STEPS, 1)

    @property
    def text(self) -> str:
        """As rows record it: ``MEDIAN:SIGMA``, and " packed"."""
        return f"{self.median:g}:{self.sigma:g}" + " packed" * self.packed

    def draw(self, rank: int, step: int, micro_batch: int, count: int = 1) -> list[int]:
        """Lengths of a micro-batch's samples: ``count`` of them, or as many as fit."""
        rng = random.Random(f"{self.seed} {rank} {step} {micro_batch}")
        if not self.packed:
            return [self._one(rng) for _ in range(count)]
        found, misses = [self._one(rng)], 0
        while misses < MISSES and sum(found) < self.longest:
            new = self._one(rng)
            if sum(found) + new <= self.longest:
                found.append(new)
            else:
                misses += 1
        return found

    def _one(self, rng: random.Random) -> int:
        drawn = math.exp(math.log(self.median) + self.sigma * rng.gauss(0, 1))
        return min(math.ceil(drawn / self.multiple) * self.multiple, self.longest)


def parse(text: str, longest: int, packed: bool) -> Lengths:
    """``MEDIAN:SIGMA``.

    Raises:
        ValueError: the text has another form, or no such distribution exists.
    """
    try:
        median, sigma = (float(x) for x in text.split(":"))
    except ValueError:
        raise ValueError(f"--lengths is {text!r}; give MEDIAN:SIGMA, for example 2048:1") from None
    if not (0 < median <= longest and 0 <= sigma < math.inf):
        raise ValueError(
            f"--lengths is {text!r} with --sequence {longest}; the median must be above 0 and at most the sequence length, "
            "and sigma at least 0"
        )
    return Lengths(median, sigma, longest, packed)


def warmup(drawer: Lengths, count: int, drawn: Iterable[list[list[list[int]]]], least: int) -> list[list[list[int]]]:
    """Steps with every shape once, the longest first.

    Args:
        count: samples of a micro-batch.
        drawn: of each rank, [step][micro-batch] -> lengths of its samples.
        least: number of steps.
    """
    everything = [step for steps in drawn for step in steps]
    found = {n for step in everything for one in step for n in computed(one, drawer.packed)} | {drawer.longest}
    rounds, shapes = len(everything[0]), sorted(found, reverse=True)
    number = max(-(-len(shapes) // rounds), least)
    turns = itertools.cycle(shapes)
    return [[[next(turns)] * (1 if drawer.packed else count) for _ in range(rounds)] for _ in range(number)]


def computed(lengths: list[int], packed: bool) -> list[int]:
    """Tokens of each row that the model computes: with padding, and for one row if packed."""
    return [sum(lengths)] if packed else [max(lengths)] * len(lengths)
