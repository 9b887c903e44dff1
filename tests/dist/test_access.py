"""Parameters read and written between steps by DeepSpeed's own functions: right values, on every rank, never in silence wrong."""

import copy

import torch
from deepspeed import utils

from support import models
from support.engine_work import Job, evaluate, same, start, told, train, whole

JOBS = [Job("rooted", "cdp-v2"), Job("llama-tied", "cdp-v1", bf16=True), Job("mlp", "dp", 2)]


def nothing_is_there(module: torch.nn.Module) -> bool:
    return all(bool(p.isnan().all()) for p in module.parameters())


def reads(rank: int, world: int, jobs: list[Job]) -> None:
    """What GatheredParameters and safe_get_* give is what the state dict and the masters hold; afterwards nothing is left."""
    from deepspeed.runtime.zero import GatheredParameters

    for job in jobs:
        engine = start(job, world)
        owner = engine._runtime.owner
        parameters = dict(engine.module.named_parameters())
        train(engine, job, rank, 0, 2)
        with GatheredParameters(list(engine.module.parameters())):
            got = {n: p.detach().clone() for n, p in parameters.items()}
            inside = {n: v.clone() for n, v in engine.module.state_dict().items()}
        assert nothing_is_there(engine.module)
        first, one = next(iter(parameters.items()))
        with GatheredParameters(one):  # the others stay where they are
            assert torch.equal(one, got[first]) and one.ds_numel == one.numel()
            assert all(bool(p.isnan().all()) for p in list(parameters.values())[1:])
        for n, p in parameters.items():
            full, local = utils.safe_get_full_fp32_param(p), utils.safe_get_local_fp32_param(p)
            assert full.dtype == torch.float32 and torch.equal(full.to(p.dtype), got[n])
            if n in owner.masters or n in owner.frozen:
                assert torch.equal(local, full)
            else:
                assert local.numel() == 0
            if n in owner.masters:
                assert torch.equal(full, owner.masters[n])  # exact, not through the parameters' dtype
            if p.requires_grad:
                moment, part = (
                    f(p, "exp_avg") for f in (utils.safe_get_full_optimizer_state, utils.safe_get_local_optimizer_state)
                )
                assert moment.shape == p.shape and moment.abs().sum() > 0
                if n in owner.masters:
                    assert torch.equal(moment, owner.optimizer.state[owner.masters[n]]["exp_avg"]) and torch.equal(part, moment)
                else:
                    assert part.numel() == 0
                assert utils.safe_get_full_optimizer_state(p, "step") == 2
            else:
                assert "is frozen" in told(lambda p=p: utils.safe_get_full_optimizer_state(p, "exp_avg"))
        assert "there is 'exp_avg', 'exp_avg_sq', 'step'" in told(
            lambda one=one: utils.safe_get_full_optimizer_state(one, "momentum")
        )
        state = whole(engine)
        same(got, {n: state[n] for n in got})
        same(inside, state)
        with GatheredParameters(engine.module.parameters()):  # after this export, which leaves everything gathered
            same({n: p.detach() for n, p in parameters.items()}, got)
        train(engine, job, rank, 2, 3)
        assert any(not torch.equal(whole(engine)[n], got[n]) for n in got)
        engine.destroy()
        assert not hasattr(one, "ds_id")


def test_reading(pool):
    pool.run(2, reads, JOBS, timeout=180)


def writes(rank: int, world: int, job: Job, after_export: bool) -> dict[str, torch.Tensor]:
    """The modifier's values, and only these, become the masters and what the next step computes with."""
    import deepspeed

    engine = start(job, world)
    train(engine, job, rank, 0, 2)
    if after_export:
        whole(engine)
    parameters = dict(engine.module.named_parameters())
    names = list(parameters)
    chosen = [names[0], names[-1]]  # of the first stage and of the last
    before = whole(engine) if after_export else None
    with deepspeed.zero.GatheredParameters([parameters[n] for n in chosen], modifier_rank=1):
        for n in chosen:
            with torch.no_grad():  # every rank writes, rank 1's counts
                parameters[n].copy_(torch.full_like(parameters[n], 0.5 + rank))
    with deepspeed.zero.GatheredParameters(parameters[names[1]]):  # dropped, as under ZeRO-3
        with torch.no_grad():
            parameters[names[1]].fill_(77.0)
    if before is not None:  # still gathered: evaluation sees the new values, too
        for n in chosen:
            assert bool((parameters[n] == 1.5).all())
        assert torch.equal(parameters[names[1]], before[names[1]])
    state = whole(engine)
    for n in chosen:
        assert bool((state[n] == 1.5).all()), n
    assert not bool((state[names[1]] == 77.0).any())

    value = torch.arange(parameters[names[0]].numel()).reshape(parameters[names[0]].shape) / 64
    utils.safe_set_full_fp32_param(parameters[names[0]], value)
    assert torch.equal(utils.safe_get_full_fp32_param(parameters[names[0]]), value)
    utils.safe_set_full_optimizer_state(parameters[names[0]], value + 1, "exp_avg")
    assert torch.equal(utils.safe_get_full_optimizer_state(parameters[names[0]], "exp_avg"), value + 1)
    part = utils.safe_get_local_fp32_param(parameters[names[-1]])
    utils.safe_set_local_fp32_param(parameters[names[-1]], part + 1)
    assert bool((utils.safe_get_full_fp32_param(parameters[names[-1]]) == 2.5).all())
    utils.safe_set_local_optimizer_state(parameters[names[-1]], part * 0 + 3, "exp_avg")
    assert bool((utils.safe_get_full_optimizer_state(parameters[names[-1]], "exp_avg") == 3).all())
    wrong = told(lambda: utils.safe_set_local_optimizer_state(parameters[names[-1]], torch.tensor(7.0), "exp_avg"))
    assert ("the state 'exp_avg' has" in wrong) == (names[-1] in engine._runtime.owner.masters)
    assert "there is 'exp_avg', 'exp_avg_sq', 'step'" in told(
        lambda: utils.safe_set_local_optimizer_state(parameters[names[-1]], part, "momentum")
    )
    state = whole(engine)
    assert torch.equal(state[names[0]], value.to(state[names[0]].dtype)) and bool((state[names[-1]] == 2.5).all())
    evaluated = evaluate(engine, job, rank, 1)

    reference = models.build(job.kind)  # what was published is what was written: the same losses as a plain module with it
    reference.load_state_dict(state)
    with torch.no_grad():
        from support.engine_work import OFF_STEPS

        want = models.loss(reference, job.kind, models.batch(job.kind, OFF_STEPS, 0, rank)).item()
        first = models.loss(reference, job.kind, models.batch(job.kind, 2, 0, rank)).item()
        reference.get_parameter(names[1]).fill_(0.25)
        changed = models.loss(reference, job.kind, models.batch(job.kind, OFF_STEPS, 0, rank)).item()
    assert evaluated == [want]
    for gathered in (True, False):  # an evaluation inside the context sees what was written there; nothing of it stays
        if not gathered:
            engine._runtime.scatter()
        with torch.no_grad(), deepspeed.zero.GatheredParameters(parameters[names[1]]):
            parameters[names[1]].fill_(0.25)
            assert evaluate(engine, job, rank, 1) == [changed] != [want]
        assert evaluate(engine, job, rank, 1) == [want]
    losses = train(engine, job, rank, 2, 3)
    assert losses[2, 0, rank] == first
    engine.destroy()


def test_writing(pool):
    pool.run(2, writes, Job("mlp", "cdp-v2"), False, timeout=120)
    pool.run(2, writes, Job("mlp", "cdp-v1"), True, timeout=120)


def refusals(rank: int, world: int, job: Job) -> dict[str, str]:
    import deepspeed

    engine = start(job, world)
    train(engine, job, rank, 0, 1)
    p = next(engine.module.parameters())
    texts = {
        "early": told(lambda: engine.module.blocks[0].state_dict()),  # a part of the module: once silently nan
        "deepcopy": told(lambda: copy.deepcopy(engine.module)),
        "deepcopy part": told(lambda: copy.deepcopy(engine.module.blocks)),
        "load part": told(lambda: engine.module.blocks[0].load_state_dict({}, strict=False)),
    }
    gradients: list[torch.Tensor] = []
    handle = p.register_hook(lambda grad: gradients.append(grad.clone()))  # what the refusal below recommends
    loss = models.loss(engine, job.kind, models.batch(job.kind, 1, 0, rank))
    texts["after forward"] = told(lambda: utils.safe_get_full_fp32_param(p))
    engine.backward(loss)
    handle.remove()
    assert len(gradients) == 1 and gradients[0].shape == p.shape and gradients[0].abs().sum() > 0
    texts["after backward"] = told(lambda: deepspeed.zero.GatheredParameters([p]).__enter__())
    for name in ("safe_get_full_grad", "safe_get_local_grad"):
        texts[name] = told(lambda name=name: getattr(utils, name)(p))
    for name in ("safe_set_full_grad", "safe_set_local_grad"):
        texts[name] = told(lambda name=name: getattr(utils, name)(p, torch.zeros_like(p)))
    texts["vectorized"] = told(lambda: utils.safe_update_full_grad_vectorized([p], lambda grad, p: grad))
    engine.step()
    texts["shape"] = told(lambda: utils.safe_set_full_fp32_param(p, torch.zeros(3)))
    texts["local shape"] = told(lambda: utils.safe_set_local_fp32_param(p, torch.zeros(3)))
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        texts["nested"] = told(lambda: deepspeed.zero.GatheredParameters([p]).__enter__())
        texts["train inside"] = told(lambda: models.loss(engine, job.kind, models.batch(job.kind, 2, 0, rank)))
    torch.distributed.barrier()
    engine.destroy()
    texts["after destroy"] = told(lambda: engine.module.state_dict())
    texts["part after destroy"] = told(lambda: engine.module.blocks[0](torch.zeros(1, 8)))
    texts["deepcopy after destroy"] = told(lambda: copy.deepcopy(engine.module))
    again = start(job, world, engine.module)
    models.loss(again, job.kind, models.batch(job.kind, 0, 0, rank))
    torch.distributed.barrier()
    again.destroy()
    texts["destroyed in a step"] = told(lambda: engine.module.blocks[0](torch.zeros(1, 8)))
    texts["again"] = told(lambda: start(job, world, engine.module))
    return texts


def test_what_cannot_be_given_is_refused_in_a_sentence(pool):
    wanted = {
        "early": "use engine.module_state_dict() on every rank",
        "deepcopy": "copy it before deepspeed.initialize()",
        "deepcopy part": "copy it before deepspeed.initialize()",
        "load part": "would not reach the masters",
        "after forward": "in the middle of step 1, while parameters and gradient sums",
        "after backward": "call it after engine.step()",
        **{
            name: f"{name} asked for the gradient of 'blocks.0.0.weight'"
            for name in ("safe_get_full_grad", "safe_get_local_grad", "safe_set_full_grad", "safe_set_local_grad")
        },
        "vectorized": "engine.get_global_grad_norm()",
        "shape": "got a value of shape (3,), the parameter has (8, 8)",
        "local shape": "give what safe_get_local_fp32_param returns",
        "nested": "cannot overlap",
        "train inside": "inside GatheredParameters; leave the context first",
        "after destroy": "used after engine.destroy()",
        "part after destroy": "used after engine.destroy()",
        "deepcopy after destroy": "copy it inside deepspeed.zero.GatheredParameters",
        "destroyed in a step": "used after its engine failed, or was destroyed in the middle of a step",
        "again": "has no values",
    }
    for texts in pool.run(2, refusals, Job("mlp", "cdp-v2", timeout=20.0), timeout=120):
        assert texts.keys() == wanted.keys()
        for name, words in wanted.items():
            assert words in texts[name] and texts[name].count("\n") == 0, (name, texts[name])


def tools(rank: int, world: int, job: Job) -> None:
    """The patterns of TRL and Lightning: merged weights inside the context are what generation sees, and do not stay; weights
    loaded inside it do; an average kept beside the model is filled from it."""
    import deepspeed
    from deepspeed.runtime.zero.stage3 import unwrap_model_for_generation

    average = models.build(job.kind)  # a copy made before
    engine = start(job, world)
    train(engine, job, rank, 0, 2)
    want = whole(engine)
    train(engine, job, rank, 2, 3)
    ids = torch.arange(1, 4)[None].repeat(2, 1)
    with unwrap_model_for_generation(engine) as unwrapped:
        for p in unwrapped.module.parameters():
            p.ds_active_sub_modules.clear()
        plain = models.build(job.kind)
        plain.load_state_dict(unwrapped.module.state_dict())
        with torch.no_grad():  # merging: not to be kept
            for module in (unwrapped.module, plain):
                module.lm_head.weight.mul_(-1)
        lengths = {"max_new_tokens": 4 + 3 * rank, "do_sample": False}  # the ranks are done at different times
        unwrapped.module.eval(), plain.eval()
        assert torch.equal(unwrapped.module.generate(ids, **lengths), plain.generate(ids, **lengths))
        unwrapped.module.train()
    assert nothing_is_there(engine.module)
    train(engine, job, rank, 3, 4)
    assert not torch.equal(whole(engine)["lm_head.weight"], want["lm_head.weight"])
    train(engine, job, rank, 4, 5)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        if rank == 0:
            engine.module.load_state_dict(want)
    same(whole(engine), want)
    train(engine, job, rank, 5, 6)
    with torch.no_grad(), deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for mine, p in zip(average.parameters(), engine.module.parameters()):
            mine.lerp_(p, 1.0)
    same(average.state_dict(), whole(engine))
    engine.destroy()


def test_patterns_of_tools(pool):
    pool.run(2, tools, Job("llama", "cdp-v2"), timeout=180)
