"""fp32 masters of a stage, whole or in halves.

A published copy of a bf16 parameter is its master's upper 16 bits, rounded. With the lower 16 bits the owner has the master
again, so it need not keep the upper ones twice: 2 bytes a parameter fewer.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch

HIGHEST = 2**15 - 1  # of the lower halves


class Masters(Mapping[str, torch.nn.Parameter]):
    """Masters by name. An access makes a master whole, fp32; ``split`` and ``forget`` leave the halves.

    The lower half is the master's bits minus those of the published value, as integers: -2**15 to 2**15, since values are rounded
    to the nearest. 2**15 does not fit. There the master is half way between two published values, the lower of which is even; it
    moves by its last bit. Arithmetic that rounds to fp32 moves it as far in every step.

    Attributes:
        parameters: the optimizer's; nan without memory, which cannot be written, while they are in halves.
        lows: the lower halves of those kept so, int16.
        newest: of each of these, the published copy that has its upper half.
    """

    def __init__(
        self,
        parameters: dict[str, torch.nn.Parameter],
        published: Sequence[Mapping[str, torch.Tensor]],
        halved: Collection[str] = (),
    ):
        """
        Args:
            published: by copy and name. Whoever writes a value of ``halved`` there calls ``split``, or writes the lower half too.
            halved: names kept in halves, bf16 in ``published``.
        """
        self.parameters, self._published, self._whole = parameters, published, set(halved)
        self.lows = {n: torch.empty_like(parameters[n], dtype=torch.int16, requires_grad=False) for n in halved}
        self.newest = dict.fromkeys(halved, 0)
        self._nan = {n: torch.full((), torch.nan, device=low.device).expand(low.shape) for n, low in self.lows.items()}

    @staticmethod
    def suit_halves(device: torch.device) -> bool:
        """Whether masters on this device are kept in halves. On CPUs every run equals the oracle bitwise instead."""
        return device.type == "cuda"

    def __getitem__(self, name: str) -> torch.nn.Parameter:
        """The master, to be written. What is written must be published before the next update; ``value`` is for reading."""
        parameter = self.parameters[name]
        if name in self.lows and name not in self._whole:
            parameter.data = self.value(name)
            self._whole.add(name)
        return parameter

    @torch.no_grad()
    def value(self, name: str) -> torch.Tensor:
        """The master's value, fp32; of a master in halves a copy. Unlike an access it may be called from any thread."""
        if name in self.lows and name not in self._whole:
            return (self._upper(name, self.newest[name]) + self.lows[name]).view(torch.float32)
        return self.parameters[name].detach()

    def __contains__(self, name: object) -> bool:
        return name in self.parameters

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    def _upper(self, name: str, copy: int) -> torch.Tensor:
        """The bits of a published value: int32, the lower half zero."""
        return self._published[copy][name].view(torch.int16).to(torch.int32) << 16

    def rounded(self, name: str) -> torch.Tensor:
        """A tensor that rounds to the parameter's value: the master, or the newest published value."""
        if name in self.lows and name not in self._whole:
            return self._published[self.newest[name]][name]
        return self.parameters[name].detach()

    def words(self) -> Iterator[torch.Tensor]:
        """Tensors whose bits are those of the masters, halves apart."""
        for name, parameter in self.parameters.items():
            if name in self.lows:
                yield from (self._published[self.newest[name]][name], self.lows[name])
            else:
                yield parameter.detach()

    @torch.no_grad()
    def split(self, names: Iterable[str], copy: int) -> None:
        """Keep these in halves from now on; published copy ``copy`` has their rounded values."""
        for name in names:
            if name in self.lows:
                if name in self._whole:
                    self.lows[name].copy_((self.parameters[name].view(torch.int32) - self._upper(name, copy)).clamp_(max=HIGHEST))
                self.newest[name] = copy
        self.forget(names)

    def forget(self, names: Iterable[str]) -> None:
        """Drop the whole values of masters in halves."""
        for name in names if self._whole else ():
            if name in self._whole:
                self._whole.remove(name)
                self.parameters[name].data = self._nan[name]
