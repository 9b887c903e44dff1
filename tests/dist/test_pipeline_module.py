"""PipelineModule for users without a ``cyclic`` block: what the stock constructor builds and says."""

import pytest


def texts(rank: int, world: int) -> list[tuple[str, str]]:
    """By mistake: the error of the stock constructor and of ours (with initialize, which sees the config)."""
    import deepspeed
    import torch

    import deepspeed_cdp

    deepspeed.init_distributed("gloo")
    deepspeed_cdp.register()
    ours, stock = deepspeed.PipelineModule.__init__, deepspeed.PipelineModule.__init__.__wrapped__
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}}

    def told(init, **arguments) -> str:
        deepspeed.PipelineModule.__init__ = init
        try:
            module = deepspeed.PipelineModule([torch.nn.Linear(2, 2) for _ in range(6)], loss_fn=lambda x, y: x, **arguments)
            deepspeed.initialize(model=module, config=dict(config))
            return "no error"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            deepspeed.PipelineModule.__init__ = ours

    mistakes = [{"num_stages": n} for n in (2, 3, 5)] + [{}, {"num_stages": 0}, {"num_stages": 2, "stages": 3}]
    found = [(told(stock, **given), told(ours, **given)) for given in mistakes if world % (given.get("num_stages") or world + 1)]
    config["cyclic"] = {"enabled": False}
    return [*found, ("", told(ours, num_stages=world + 1 if world == 1 else 2))]


def fits(rank: int, world: int) -> list[tuple[str, list[int]]]:
    import deepspeed
    import torch

    import deepspeed_cdp

    deepspeed.init_distributed("gloo")
    deepspeed_cdp.register()
    found = []
    for init in (deepspeed.PipelineModule.__init__.__wrapped__, deepspeed.PipelineModule.__init__):
        module = deepspeed.PipelineModule.__new__(deepspeed.PipelineModule)
        torch.manual_seed(0)
        init(module, [torch.nn.Linear(2, 2) for _ in range(6)], 2)
        found.append((type(module._topo).__name__, list(module.parts), sorted(vars(module))))
    return found


@pytest.mark.parametrize("world", [1, 3])  # where 2 stages are a single device and a pyramid
def test_the_stock_error_where_the_ranks_do_not_fit(pool, world):
    for found in pool.run(world, texts):
        *alike, (_, hinted) = found
        assert any(f"num_stages (2) must divide distributed world size ({world})" in stock for stock, _ in alike)
        for stock, ours in alike:
            assert ours == stock and stock != "no error"
        assert hinted.endswith(f'world size ({world}), unless "cyclic": {{"enabled": true}} is in the config')


def test_the_stock_module_where_they_fit(pool):
    for stock, ours in pool.run(2, fits):
        assert ours == stock and stock[0] == "PipeDataParallelTopology"
