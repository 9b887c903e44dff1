"""Traffic of experts that are modules of their own, used or not: torchrun --nproc-per-node 2 skipped.py > skipped.csv"""

import deepspeed
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import deepspeed_cdp

WIDTH, INNER, EXPERTS, LAYERS, TOKENS = 128, 512, 8, 4, 256


class Layer(nn.Module):
    """Two of the allowed experts per token."""

    def __init__(self):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, INNER), nn.SiLU(), nn.Linear(INNER, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x, allowed):
        hidden = self.norm(x)
        weights, chosen = self.gate(hidden).masked_fill(~allowed, float("-inf")).softmax(-1).topk(2, -1)
        out = torch.zeros_like(hidden)
        for expert in chosen.unique().tolist():
            token, place = torch.where(chosen == expert)
            out = out.index_add(0, token, self.experts[expert](hidden[token]) * weights[token, place, None])
        return x + out


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(64, WIDTH), nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, x, allowed, y):
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden, allowed)
        return F.cross_entropy(self.head(hidden), y)


def run(rank, units, experts):
    """Messages and bytes received in the sixth step, by kind."""
    torch.manual_seed(0)
    model, allowed = Model(), torch.zeros(EXPERTS, dtype=torch.bool)
    allowed[experts] = True
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3},
        "cyclic": {"enabled": True, "delay_correction": "none", **({"units": units} if units else {})},
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    tokens = torch.Generator().manual_seed(rank)
    for _ in range(6):
        x, y = torch.randint(64, (2, TOKENS), generator=tokens)
        engine.backward(engine(x, allowed, y))
        engine.step()
    counters = engine._runtime.counters
    row = [len(engine.cyclic_plan.units), counters.messages(), *(kind["counted"] for kind in counters.traffic().values())]
    engine.destroy()
    return row


if __name__ == "__main__":
    deepspeed_cdp.register()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    single = ["embed", "layers.*.gate", "layers.*.experts.*", "head"]
    cases = {"all": [range(EXPERTS)] * 2, "0 and 1": [range(2)] * 2, "0 and 1; 6 and 7": [range(2), range(6, 8)]}
    lines = []
    for name, units in (("layers", None), ("experts", single)):
        for used, experts in cases.items():
            everyone = [None, None]
            dist.all_gather_object(everyone, run(rank, units, list(experts[rank])))
            lines += [f"{name},{used},{r},{','.join(map(str, row))}" for r, row in enumerate(everyone)]
    if rank == 0:
        print("\n".join(["units,experts_used,rank,number_of_units,messages,f_and_b_bytes,g_bytes,o_bytes", *lines]))
