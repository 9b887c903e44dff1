"""Models for the command line: built on the meta device, so without memory or weights; and the batch they are asked about."""

import argparse
import contextlib
import importlib
import inspect
import io
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from deepspeed_cdp.cli.output import UserError, whole
from deepspeed_cdp.model.discover import Example, example_of


class Loaded(NamedTuple):
    """A module on the meta device, one micro-batch for it, and both in words."""

    module: torch.nn.Module
    example: Example
    name: str
    batch: str


def add(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Options that say which model and which batch."""
    parser.add_argument(
        "--model",
        required=required,
        metavar="hf:PATH|python:MODULE:FUNC",
        help="a Hugging Face config (its folder or JSON file), or a function that returns a module, or a module "
        "and one micro-batch (a tensor, a tuple or a dict of keyword arguments); it is called under "
        "torch.device('meta')",
    )
    parser.add_argument(
        "--class",
        dest="class_name",
        metavar="NAME",
        help="hf: the class of transformers; default: the first of the config's architectures",
    )
    parser.add_argument(
        "--micro-batch",
        type=whole,
        metavar="B",
        help="hf: samples per micro-batch; default: the ds_config's train_micro_batch_size_per_gpu, else 1",
    )
    parser.add_argument(
        "--sequence", type=whole, metavar="S", help="hf: tokens per sample; default: 2048, or what the model allows"
    )


def load(
    spec: str,
    dtype: torch.dtype = torch.float32,
    micro_batch: int = 1,
    sequence: int | None = None,
    class_name: str | None = None,
) -> Loaded:
    """Build the model that ``spec`` names.

    Raises:
        UserError: the config, module or function does not exist, or gives no module.
    """
    kind, _, rest = spec.partition(":")
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        if kind == "hf" and rest:
            return _hugging_face(rest, dtype, micro_batch, sequence, class_name)
        if kind == "python" and rest.count(":") == 1:
            module_name, _, function = rest.partition(":")
            return _python(module_name, function, dtype)
    raise UserError(f"--model is {spec!r}; allowed are hf:PATH of a config and python:MODULE:FUNC; write one of these")


def _hugging_face(path: str, dtype: torch.dtype, micro_batch: int, sequence: int | None, class_name: str | None) -> Loaded:
    if not os.path.exists(path):
        raise UserError(f"--model names {path!r}, which does not exist; give a folder with config.json, or such a file")
    try:
        import transformers
    except ImportError:
        raise UserError("--model hf: needs transformers; install it, or use python:MODULE:FUNC") from None
    transformers.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        why = str(error).splitlines()[0]
        raise UserError(f"{path!r} is no Hugging Face config ({why}); give a folder with config.json") from None
    name = class_name or next(iter(getattr(config, "architectures", None) or ()), None)
    if name is None:
        raise UserError(f"the config {path!r} names no architecture; choose a class with --class, such as LlamaForCausalLM")
    make = getattr(transformers, name, None)
    if make is None:
        raise UserError(f"the class {name!r} is not in transformers {transformers.__version__}; choose one with --class")
    config.use_cache = False
    module = _built(lambda: make(config).to(dtype), name)
    module.train()
    main = getattr(module, "main_input_name", "input_ids")
    if main == "pixel_values":
        side = getattr(config, "image_size", None) or 224
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        x = torch.zeros(micro_batch, config.num_channels, height, width, dtype=dtype, device="meta")
        kwargs, batch = {"pixel_values": x}, f"{micro_batch} x {config.num_channels} x {height} x {width}"
    else:
        length = sequence or min(2048, getattr(config, "max_position_embeddings", None) or 2048)
        kwargs = {main: torch.zeros(micro_batch, length, dtype=torch.long, device="meta")}
        batch = f"{micro_batch} x {length} tokens"
    names = inspect.signature(module.forward).parameters
    if "labels" in names and name.endswith("ForCausalLM"):
        kwargs["labels"] = kwargs[main]
    elif "labels" in names and name.endswith("ForImageClassification"):
        kwargs["labels"] = torch.zeros(micro_batch, dtype=torch.long, device="meta")
    return Loaded(module, Example(kwargs=kwargs), name, batch)


def _python(module_name: str, function: str, dtype: torch.dtype) -> Loaded:
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(
            f"--model names the module {module_name!r}, which cannot be imported ({error}); run from the folder that "
            "holds it, or set PYTHONPATH"
        ) from None
    finally:
        sys.path.remove(os.getcwd())
    make = getattr(found, function, None)
    if not callable(make):
        raise UserError(f"the module {module_name!r} has no function {function!r}; name one that returns the model")
    made = _built(make, f"{module_name}.{function}()")
    module, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, torch.nn.Module):
        raise UserError(f"{module_name}.{function}() returned {type(made).__name__}; return an nn.Module, or one and a batch")
    module = module.to("meta", dtype)
    module.train()
    example = example_of(module) if batch is None else _example(batch)
    if example is None:
        raise UserError(f"{module_name}.{function}() gives no batch, and the model carries none; return (module, batch)")
    example = _on_meta(example, dtype)
    leaves = tree_leaves((example.args, dict(example.kwargs)))
    shapes = [" x ".join(map(str, t.shape)) for t in leaves if isinstance(t, torch.Tensor)]
    return Loaded(module, example, type(module).__name__, ", ".join(shapes))


def _built(make: Callable[[], Any], name: str) -> Any:
    """The result of ``make`` on the meta device.

    Raises:
        UserError: ``make`` raises an error.
    """
    try:
        with torch.device("meta"):
            return make()
    except Exception as error:  # a user's function, or a class that does not fit the config
        reason = (str(error).strip() or "no message").splitlines()[0]
        fix = "correct it, or choose another --class"
        raise UserError(f"building {name} fails with {type(error).__name__}: {reason[:200]}; {fix}") from None


def _example(batch: Any) -> Example:
    if isinstance(batch, Mapping):
        return Example(kwargs=dict(batch))
    return Example(args=tuple(batch) if isinstance(batch, (tuple, list)) else (batch,))


def _on_meta(example: Example, dtype: torch.dtype) -> Example:
    args, kwargs = tree_map_only(
        torch.Tensor,
        lambda t: t.to("meta", dtype if t.is_floating_point() else t.dtype),
        (tuple(example.args), dict(example.kwargs)),
    )
    return Example(args, kwargs)
