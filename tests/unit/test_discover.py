"""model/discover.py on models of many shapes."""

import copy
import json
import logging
import random

import pytest
import torch
import transformers as hf
from torch import nn

from deepspeed_cdp.model import discover
from deepspeed_cdp.model.discover import Example, FoundUnits, example_of, find_units, observe, trace
from deepspeed_cdp.plan.unit_schedule import Unit
from support.discover_models import IMAGE, SMALL, X8, llama, mlp, vit


def bert():
    return hf.BertForSequenceClassification(hf.BertConfig(vocab_size=64, num_hidden_layers=2, **SMALL))


def t5():
    return hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
    )


def albert():
    return hf.AlbertForMaskedLM(hf.AlbertConfig(vocab_size=64, embedding_size=8, num_hidden_layers=2, **SMALL))


def nested():
    def part():
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))

    return nn.Sequential(part(), part(), nn.Linear(8, 2))


class Net(nn.Module):
    """Members in the order given, and a forward."""

    def __init__(self, run, **members):
        super().__init__()
        self.run = run
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, x, *args, **kwargs):
        return self.run(self, x, *args, **kwargs)


def linear():
    return nn.Linear(8, 8)


def resnet():
    def residual(c, out):
        return Net(
            lambda m, x: torch.relu(m.bn1(m.conv1(x)) + m.down(x)),
            conv1=nn.Conv2d(c, out, 3, padding=1),
            bn1=nn.BatchNorm2d(out),
            down=nn.Sequential(nn.Conv2d(c, out, 1), nn.BatchNorm2d(out)),
        )

    return Net(
        lambda m, x: m.fc(m.layer2(m.layer1(m.bn(m.conv(x)))).mean((2, 3))),
        fc=nn.Linear(8, 2),  # registered first, called last
        conv=nn.Conv2d(3, 4, 3),
        bn=nn.BatchNorm2d(4),
        layer1=nn.Sequential(residual(4, 4), residual(4, 4)),
        layer2=nn.Sequential(residual(4, 8), residual(8, 8)),
    )


def rooted():
    """Parameters on the root, a ParameterList, an empty parameter, a frozen layer, and a branch not taken."""

    def run(m, x, spare=False):
        x = m.b(x * m.scale + m.shifts[0])
        return m.a(m.spare(x) if spare else x) + m.shifts[1]

    return Net(
        run,
        scale=nn.Parameter(torch.ones(8)),
        empty=nn.Parameter(torch.ones(0)),
        shifts=nn.ParameterList([torch.zeros(8), torch.zeros(8)]),
        a=linear().requires_grad_(False),
        spare=linear(),
        b=linear(),
    )


def moe(route=False):
    def block(m, x):
        g = m.gate(x).softmax(-1)
        if route:  # depends on the data
            return m.experts[int(g.mean(0).argmax())](x)
        return sum(g[..., i : i + 1] * expert(x) for i, expert in enumerate(m.experts))

    blocks = [Net(block, gate=nn.Linear(8, 2), experts=nn.ModuleList([linear(), linear()])) for _ in range(2)]
    return Net(lambda m, x: m.layers[1](m.layers[0](x)), layers=nn.ModuleList(blocks))


def twice():
    return Net(lambda m, x: m.last(m.block(m.block(m.first(x)))), first=linear(), block=linear(), last=linear())


SEQ = Example((torch.zeros(3, 2, 16), torch.zeros(3, 2, 16)))


def transformer():
    return nn.Transformer(16, 2, 2, 2, 32, batch_first=True)


MODELS = {
    "mlp": (mlp, X8),
    "nested": (nested, X8),
    "llama": (llama, None),
    "tied": (lambda: llama(True), None),
    "vit": (vit, None),
    "bert": (bert, None),
    "t5": (t5, None),
    "albert": (albert, None),
    "resnet": (resnet, IMAGE),
    "rooted": (rooted, X8),
    "moe": (moe, X8),
    "transformer": (transformer, SEQ),
    "linear": (linear, X8),
}


def build(name):
    make, example = MODELS[name]
    model = make()
    return model, example or example_of(model)


def names(units: FoundUnits):
    return [unit.name for unit in units.units]


def check(model, units):
    """Every parameter exactly once, each list in order, each unit's parameters below it, costs are element counts."""
    order = [name for name, _ in model.named_parameters()]
    carried = [list(unit.parameters) for unit in units.units]
    assert sorted(sum(carried, list(units.persistent))) == sorted(order)
    for part in [*carried, list(units.persistent)]:
        assert part == sorted(part, key=order.index)
    modules = dict(model.named_modules())
    for unit in units.units:
        below = {id(p) for p in modules[unit.name].parameters()}
        assert unit.parameters and all(id(model.get_parameter(name)) in below for name in unit.parameters)
        assert unit.cost_parameters == sum(model.get_parameter(name).numel() for name in unit.parameters)
        assert unit.type_name == type(modules[unit.name]).__name__
        assert not unit.name.endswith("out_proj")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_once_at_every_depth(name, traced, monkeypatch):
    model, example = build(name)
    seen, example, count = trace(model, example), example if traced else None, 0
    monkeypatch.setattr(discover, "trace", lambda *_: seen)  # once, not at every depth
    for at_least in range(1, 40):
        try:
            units = find_units(model, at_least, example)
        except ValueError as error:
            assert f"has {count} units for {at_least} ranks: use at most {count} ranks, or a model with more layers" in str(error)
            break
        count = len(units.units)
        assert count >= at_least
        check(model, units)
        if traced:
            assert sum(unit.flops for unit in units.units) == seen.flops[""] > 0
    assert name == "linear" or count >= 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_trace_leaves_the_module_identical(name, training):
    model, example = build(name)
    model.train(training)
    next(iter(model.modules())).marker = []
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    values = [(key, id(t), t.detach().clone(), t._version, t.data_ptr(), t.requires_grad, t.grad) for key, t in tensors]
    attributes = [(m, {k: copy.copy(v) for k, v in m.__dict__.items()}) for m in model.modules()]
    flags = [m.training for m in model.modules()]
    torch.manual_seed(3)
    random.seed(3)
    state = torch.get_rng_state(), random.getstate()
    assert trace(model, example) is not None
    assert torch.equal(torch.get_rng_state(), state[0]) and random.getstate() == state[1]
    again = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    assert len(again) == len(values)
    for (key, t), (key0, at, value, version, pointer, grad, g) in zip(again, values, strict=True):
        assert (key, id(t), t._version, t.data_ptr(), t.requires_grad) == (key0, at, version, pointer, grad)
        assert torch.equal(t, value) and t.grad is g
    assert flags == [m.training for m in model.modules()]
    for m, before in attributes:
        assert list(m.__dict__) == list(before)
        for key in ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"):
            assert list(m.__dict__[key]) == list(before[key])


def test_trace_undoes_what_forward_writes():
    def run(m, x):
        m.cached, m.table["x"], m.mean = x * 2, x, m.mean + x.mean(0)
        m.log.append(x)
        m.count += 1
        m.counts[0].add_(1)
        return m.b(m.a(x + torch.rand(8) + random.random()))

    mean = nn.Buffer(torch.zeros(8))
    model = Net(run, a=linear(), b=linear(), table={}, log=[], count=torch.zeros(()), counts=[torch.zeros(())], mean=mean)
    assert trace(model, X8) is not None
    assert not hasattr(model, "cached") and model.table == {} and model.log == []
    assert model.mean is mean and model.count == model.counts[0] == 0 and type(model.count) is torch.Tensor


def test_trace_allocates_no_activations():
    model = nn.Sequential(nn.Linear(8, 1 << 20, device="meta"), nn.Linear(1 << 20, 8, device="meta"))
    seen = trace(model, Example((torch.zeros(1 << 18, 8),)))  # 1 TB of activations
    assert seen.flops == {"0": 2 << 41, "1": 2 << 41, "": 4 << 41} and seen.calls == {"": 1, "0": 1, "1": 1}


def test_trace_failure_is_none_and_logged(caplog):
    with caplog.at_level(logging.INFO, "deepspeed_cdp"):
        assert trace(moe(route=True), X8) is None
    assert "no trace of Net: DataDependent" in caplog.text
    units = find_units(moe(route=True), 2, X8)
    assert names(units) == ["layers.0", "layers.1"] and units.units[0].flops is None


def test_an_engines_hooks_round_the_model_are_left_out():
    """DeepSpeed puts its hooks on the model before it makes the optimizer, and they fail until it has."""

    def not_yet(*_):
        raise AttributeError("'CyclicEngine' object has no attribute 'engine_timers'")

    model, example = mlp(), Example((torch.zeros(1, 8),))
    expected = trace(mlp(), example)
    handles = [model.register_forward_pre_hook(not_yet, with_kwargs=True), model.register_forward_hook(not_yet)]
    assert expected is not None and trace(model, example) == expected
    with pytest.raises(AttributeError):
        model(*example.args)
    for handle in handles:
        handle.remove()
    model(*example.args)


def test_sequential():
    model = mlp()
    model[2].empty = nn.Parameter(torch.zeros(0))
    assert names(find_units(model, 1)) == ["0", "2", "4"] and "2.empty" in find_units(model, 1).units[1].parameters
    assert names(find_units(nested(), 2)) == ["0", "1", "2"]
    assert names(find_units(nested(), 4)) == ["0.0", "0.2", "1", "2"]
    assert names(find_units(nested(), 6)) == ["0.0", "0.2.0", "0.2.1", "1.0", "1.2", "2"]


@pytest.mark.parametrize("traced", [False, True])
def test_llama(traced):
    model = llama()
    units = find_units(model, 2, example_of(model) if traced else None)
    layers = [f"model.layers.{i}" for i in range(3)]
    assert names(units) == ["model.embed_tokens", *layers, "model.norm", "lm_head"] and units.persistent == ()
    assert [unit.type_name for unit in units.units][:2] == ["Embedding", "LlamaDecoderLayer"]
    model = llama(True)
    units = find_units(model, 2, example_of(model) if traced else None)
    assert names(units) == [*layers, "model.norm"] and units.persistent == ("model.embed_tokens.weight",)
    assert units.persistent_cost == 64 * 16


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="torch 2.6 has no grouped_mm")
def test_flops_include_products_of_groups():
    """Mixtral's experts, of which each token uses two."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 50}
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(**sizes, num_hidden_layers=1, num_local_experts=8)).to(torch.bfloat16)
    seen = trace(model, Example(kwargs={"input_ids": torch.zeros(1, 40, dtype=torch.long, device="meta")}))
    assert seen.flops["model.layers.0.mlp.experts"] == 2 * 40 * 2 * (32 * 128 + 64 * 32)


@pytest.mark.parametrize("seen_by", [trace, observe])
def test_flops_include_what_runs_in_inference_mode(seen_by):
    """There torch's composite operators, such as linear, arrive whole."""

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x):
            with torch.inference_mode():
                hidden = self.frozen(x)
            return self.head(hidden.clone())

    assert seen_by(Half(), Example((torch.ones(6, 8),))).flops == {"frozen": 1536, "head": 768, "": 2304}


def test_flops_include_attention_and_the_tied_head():
    model = llama(True)
    seen, units = trace(model, example_of(model)), find_units(model, 2, example_of(model))
    tokens, linear, attention, head = 15, 4 * 16 * 16 + 3 * 16 * 32, 2 * 2 * 3 * 5 * 5 * 16, 2 * 15 * 16 * 64
    assert seen.flops["model.layers.1"] == 2 * tokens * linear + attention
    assert units.units[0].flops == seen.flops["model.layers.0"] and units.units[-1].flops == head


def test_one_layer_is_split_deeper():
    units = find_units(llama(layers=1), 5)
    pieces = ["self_attn", "mlp", "input_layernorm", "post_attention_layernorm"]
    assert names(units)[1:5] == [f"model.layers.0.{piece}" for piece in pieces]
    model = llama(layers=1)
    in_order = [n.rpartition(".")[2] for n in names(find_units(model, 5, example_of(model)))]
    assert in_order == ["embed_tokens", "input_layernorm", "self_attn", "post_attention_layernorm", "mlp", "norm", "lm_head"]


def test_vit_embeddings_are_one_unit():
    model = vit()
    for example in (None, example_of(model)):
        units = find_units(model, 2, example)
        assert names(units) == ["vit.embeddings", "vit.layers.0", "vit.layers.1", "vit.layernorm", "classifier"]
        assert {"vit.embeddings.cls_token", "vit.embeddings.position_embeddings"} < set(units.units[0].parameters)
        assert units.persistent == ()


def test_bert_and_t5():
    assert names(find_units(bert(), 2)) == [
        "bert.embeddings",
        "bert.encoder.layer.0",
        "bert.encoder.layer.1",
        "bert.pooler",
        "classifier",
    ]
    model = t5()
    units = find_units(model, 2, example_of(model))
    assert units.persistent == ("shared.weight",)
    assert names(units) == [f"{side}.{x}" for side in ("encoder", "decoder") for x in ("block.0", "block.1", "final_layer_norm")]


def test_conv_net_in_execution_order():
    blocks = ["conv", "bn", "layer1.0", "layer1.1", "layer2.0", "layer2.1"]
    assert names(find_units(resnet(), 2)) == ["fc", *blocks]
    assert names(find_units(resnet(), 2, IMAGE)) == [*blocks, "fc"]


def test_root_parameters_are_held_and_an_untaken_branch_keeps_its_place():
    units, traced = find_units(rooted(), 2), find_units(rooted(), 2, X8)
    assert units.persistent == traced.persistent == ("scale", "empty", "shifts.0", "shifts.1") and units.persistent_cost == 24
    assert names(units) == ["a", "spare", "b"] and names(traced) == ["b", "a", "spare"] and traced.units[2].flops == 0
    assert names(find_units(rooted(), 2, Example((torch.zeros(3, 8),), {"spare": True}))) == ["b", "spare", "a"]


def test_moe_stays_inside_its_block_until_needed():
    assert names(find_units(moe(), 2)) == ["layers.0", "layers.1"]
    assert names(find_units(moe(), 3)) == ["layers.0.gate", "layers.0.experts.0", "layers.0.experts.1", "layers.1"]


def test_split_prefers_to_hold_nothing():
    large = Net(None, own=nn.Parameter(torch.zeros(99)), a=linear(), b=linear())
    model = nn.Sequential(large, Net(None, a=linear(), b=linear()))
    units = find_units(model, 3)
    assert names(units) == ["0", "1.a", "1.b"] and units.persistent == ()
    units = find_units(model, 4)
    assert names(units) == ["0.a", "0.b", "1.a", "1.b"] and units.persistent == ("0.own",)


def test_a_module_that_is_read_not_called_is_not_split_off():
    reads = Net(lambda m, x: nn.functional.linear(m.q(x), m.out.weight, m.out.bias), q=linear(), out=linear())
    model = nn.Sequential(reads, linear())
    assert names(find_units(model, 2, X8)) == ["0", "1"]
    with pytest.raises(ValueError, match="has 2 units for 3 ranks: use at most 2 ranks"):
        find_units(model, 3, X8)
    attention = nn.MultiheadAttention(8, 2)
    assert names(find_units(attention, 1)) == [""]
    attention.extra = linear()  # a second child must not open it either
    with pytest.raises(ValueError, match="has 1 units for 2 ranks"):
        find_units(attention, 2)
    for at_least in (6, 20):
        units = find_units(transformer(), at_least, SEQ)
        assert all(u.name + ".out_proj.weight" in u.parameters for u in units.units if u.name.endswith("attn"))


def test_called_twice_is_held():
    units = find_units(twice(), 2, X8)
    assert names(units) == ["first", "last"] and units.persistent == ("block.weight", "block.bias")
    assert names(find_units(twice(), 2)) == ["first", "block", "last"]  # unknowable without an example
    with pytest.raises(ValueError, match="cyclic.units has 'block', whose parameters are all shared .* or used several times"):
        find_units(twice(), 1, X8, names=["block"])
    model = albert()
    units = find_units(model, 2, example_of(model))
    assert any("albert_layer_groups.0" in name for name in units.persistent)
    assert not any("albert_layer_groups" in name for name in names(units))


def test_one_module_at_two_paths():
    shared = nn.Linear(8, 8)
    model = nn.Sequential(nn.Linear(8, 8), shared, nn.ReLU(), shared, nn.Linear(8, 8))
    for example in (None, X8):
        units = find_units(model, 2, example)
        assert names(units) == ["0", "4"] and units.persistent == ("1.weight", "1.bias")


def test_tied_parameter_leaves_the_rest_of_its_unit():
    model = mlp()
    model[2].weight = model[0].weight
    units = find_units(model, 2)
    assert [u.parameters for u in units.units] == [("0.bias",), ("2.bias",), ("4.weight", "4.bias")]
    assert units.persistent == ("0.weight",)
    model[0].bias = model[2].bias  # the units 0 and 2 have nothing left
    assert names(find_units(model, 1)) == ["4"]


def test_containers_that_are_never_called():
    blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    gpt = nn.ModuleDict({"wte": nn.Embedding(8, 8), "h": blocks, "ln": nn.LayerNorm(8)})
    assert names(find_units(Net(None, transformer=gpt), 2)) == [f"transformer.{x}" for x in ("wte", "h.0", "h.1", "ln")]


def test_lstm():
    model = Net(lambda m, x: m.head(m.lstm(x)[0]), lstm=nn.LSTM(8, 8, 2), head=linear())
    seen, units = trace(model, X8), find_units(model, 2, X8)
    assert set(seen.inside) == {name for name, _ in model.named_parameters()} and seen.inside["lstm.weight_ih_l0"] == {"", "lstm"}
    assert names(units) == ["lstm", "head"] and units.persistent == ()
    assert all(a is b for a, b in zip(model.lstm._flat_weights, model.lstm.parameters(), strict=True))


def test_parametrized_and_wrapped():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8))
    for example in (None, X8):
        assert names(find_units(model, 2, example)) == ["0", "1"]
    assert names(find_units(Net(lambda m, x: m.net(x), net=twice()), 1)) == ["net.first", "net.block", "net.last"]


# ---- forwards of several ranks ------------------------------------------------------------------------------------------------
def of_calls(*paths: str) -> discover.Trace:
    """A trace that calls these modules in turn, one operation each."""
    seen = discover.Trace()
    for at, path in enumerate(paths):
        seen.order.setdefault(path, at)
        seen.calls[path] = seen.calls.get(path, 0) + 1
        seen.before.setdefault(path, at)
        seen.flops[path] = 1
    return seen


def plan_units(*paths: str) -> list[Unit]:
    return [Unit(path, 0, (f"{path}.weight",), (), 1, 1, (path,)) for path in paths]


def linears(*names: str) -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(1, 1) for name in names})


def test_ranks_that_take_different_branches_fit_one_plan():
    """Each forward alone must follow the plan; the order between branches that no forward takes together is free."""
    units = plan_units("a", "b", "c", "d")
    for seen in (of_calls("a", "d"), of_calls("b", "c"), of_calls()):
        assert discover.misfit(units, seen) == ""
    assert discover.misfit(units, of_calls("b", "a")) == "'b' is called before 'a'"
    assert discover.misfit(units, of_calls("a", "a")) == "'a' is called 2 times in a forward"
    outside = of_calls("a")
    outside.inside["a.weight"] = frozenset({"", "b"})
    assert discover.misfit(units, outside) == "parameter 'a.weight' is read outside 'a'"


def test_joined_forwards_keep_every_order():
    """Where none tells, modules come as they are defined; a circle gives some order."""
    module = linears("a", "b", "c", "d")
    assert list(discover.join(module, [of_calls("a", "d"), of_calls("b", "c")]).order) == ["a", "b", "c", "d"]
    assert list(discover.join(module, [of_calls("d", "a"), of_calls("c", "b", "a")]).order) == ["c", "b", "d", "a"]
    assert list(discover.join(module, [of_calls("c"), of_calls("c", "d", "a")]).order) == ["c", "d", "a"]
    assert {*discover.join(module, [of_calls("a", "b"), of_calls("b", "a")]).order} == {"a", "b"}
    joined = discover.join(module, [of_calls("d", "a"), of_calls("a", "a")])
    assert joined.calls == {"d": 1, "a": 2} and sorted(joined.before.values()) == list(joined.before.values())


def test_a_trace_survives_its_packing():
    seen = of_calls("a", "b")
    seen.inside["a.weight"] = frozenset({"", "a"})
    assert discover.Trace.unpacked(json.loads(json.dumps(seen.packed()))) == seen
