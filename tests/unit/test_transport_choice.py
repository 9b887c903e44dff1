"""Which transport is chosen, from what the ranks see; no GPU needed."""

import json
from dataclasses import replace

import pytest
import torch

from deepspeed_cdp.integration.config import parse_cyclic
from deepspeed_cdp.transport.choose import DeviceFacts, choose, observe


def gpus(count: int, host: str = "a") -> list[DeviceFacts]:
    names = [f"{host}{i}" for i in range(count)]
    return [DeviceFacts(host, "cuda", n, names, [m for m in names if m != n]) for n in names]


CPUS = [DeviceFacts("a", "cpu"), DeviceFacts("b", "cpu")]


def refusal(kind: str, facts: list[DeviceFacts], tried: str = "") -> str:
    with pytest.raises(ValueError) as caught:
        choose(kind, facts, tried)
    text = str(caught.value)
    assert text.startswith(f"cyclic.transport is '{kind}', which cannot work here: ")
    assert "allowed are" in text and "\n" not in text
    return text


@pytest.mark.parametrize("kind", ["auto", "gloo"])
def test_cpus(kind):
    assert choose(kind, CPUS) == ("gloo", "the ranks compute on CPUs")


@pytest.mark.parametrize("kind", ["peer", "nccl"])
def test_gpu_transports_are_refused_on_cpus(kind):
    assert "the ranks compute on CPUs" in refusal(kind, CPUS) and "use 'auto'" in refusal(kind, CPUS)


def test_gloo_is_refused_on_gpus():
    assert "the ranks compute on GPUs" in refusal("gloo", gpus(2))


@pytest.mark.parametrize("kind", ["auto", "peer"])
def test_gpus_that_reach_each_other(kind):
    assert choose(kind, gpus(4)) == ("peer", "the 4 GPUs of one host reach each other's memory")
    assert choose(kind, gpus(1)) == ("peer", "one GPU")


def test_nccl_on_request():
    assert choose("nccl", gpus(4)) == ("nccl", "cyclic.transport asks for it")


def without_access() -> list[DeviceFacts]:
    facts = gpus(3)
    return [facts[0], replace(facts[1], reaches=["a0"]), facts[2]]


def isolated() -> list[DeviceFacts]:
    return [replace(f, sees=[f.device], reaches=[]) for f in gpus(2)]


CASES = [
    ([*gpus(2), *gpus(2, "b")], "ranks 0 and 2 are on different hosts"),
    (without_access(), "the GPU of rank 1 does not reach the memory of rank 2's"),
    ([gpus(2)[0], replace(gpus(2)[1], peer_trouble="no memory shared (x)")], "rank 1: no memory shared (x)"),
]


@pytest.mark.parametrize(("facts", "reason"), CASES, ids=["hosts", "access", "memory"])
def test_gpus_that_do_not(facts, reason):
    assert choose("auto", facts) == ("nccl", reason)
    assert reason in refusal("peer", facts)
    assert choose("nccl", facts)[0] == "nccl"


def test_gpus_that_are_not_seen_are_tried_only_on_request():
    name, reason = choose("auto", isolated())
    assert name == "nccl" and "rank 0 does not see the GPU of rank 1" in reason
    assert choose("peer", isolated())[0] == "peer"


def test_a_transport_that_was_tried_in_vain():
    assert choose("auto", gpus(2), "rank 1: CUDA error") == ("nccl", "rank 1: CUDA error")
    assert "rank 1: CUDA error" in refusal("peer", gpus(2), "rank 1: CUDA error")


def test_no_nccl_either():
    facts = [replace(f, nccl_trouble="no NCCL (x)") for f in without_access()]
    text = refusal("auto", facts)
    assert "does not reach" in text and "rank 0: no NCCL (x)" in text
    assert "rank 0: no NCCL (x)" in refusal("nccl", facts)
    assert choose("auto", [replace(f, nccl_trouble="no NCCL (x)") for f in gpus(2)])[0] == "peer"


def test_two_ranks_on_one_gpu_and_mixed_devices():
    one = gpus(2)[0]
    for kind in ("auto", "peer", "nccl"):
        assert "ranks 0 and 1 compute on the same GPU" in refusal(kind, [one, one])
        assert "['cpu', 'cuda']" in refusal(kind, [one, CPUS[0]])
    assert choose("auto", [one, replace(one, host="b")])[0] == "nccl"  # the same name on another host is another GPU


def test_ranks_share_a_gpu_only_where_the_environment_permits_it():
    one = replace(gpus(2)[0], permits=("peer",))
    assert choose("peer", [one, one]) == ("peer", "ranks share GPUs, as the environment permits: slow")
    assert choose("auto", [one, one])[0] == "peer"
    assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in refusal("nccl", [one, one])
    assert "same GPU" in refusal("auto", [one, replace(one, permits=("nccl",))])
    both = replace(one, permits=("peer", "nccl"))
    assert choose("auto", [both, both], "rank 1: CUDA error") == ("nccl", "rank 1: CUDA error")
    assert choose("nccl", [replace(one, permits=("nccl",))] * 3)[0] == "nccl"
    assert "DEEPSPEED_CDP_SHARE_GPU=1" in refusal("peer", [one, replace(one, permits=())])


def test_facts_travel_as_json():
    for facts in (observe(torch.device("cpu")), *gpus(2)):
        there = DeviceFacts(**json.loads(json.dumps(facts.as_dict())))
        assert choose("auto", [there]) == choose("auto", [facts])


def test_the_config_takes_every_transport():
    for kind in ("auto", "gloo", "nccl", "peer"):
        assert parse_cyclic({"cyclic": {"enabled": True, "transport": kind}}).transport == kind
