"""Registers deepspeed_cdp when `deepspeed` is imported.

DeepSpeed has no plugin hook. At interpreter start-up, in every program, the installed deepspeed_cdp_autoload.pth puts a small
finder on sys.meta_path. When `deepspeed` is imported, the finder imports this file. This file has the loader call
deepspeed_cdp.integration.plugin.register() right after it has executed the module: `from deepspeed import initialize` gets the
registered function. The finder stays, for importlib.reload.

The finder's code is in the .pth file itself: importing a module at start-up would list the library's folders, which takes longer
than everything else. In a virtual environment Python runs every .pth file twice, hence its last condition.
"""

import sys
from typing import Any


def _register() -> None:
    """Registers the engine; a failure warns, because an import of deepspeed must not break on our account."""
    try:
        from deepspeed_cdp.integration.plugin import register

        register()
    except Exception as error:
        gone = ("deepspeed_cdp", "deepspeed_cdp.integration", "deepspeed_cdp.integration.plugin")
        if isinstance(error, ModuleNotFoundError) and error.name in gone:
            return  # half uninstalled: nothing to register
        import warnings

        warnings.warn(
            f'deepspeed_cdp is installed but could not register its engine, so a "cyclic" block in ds_config is '
            f"without effect: {type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )


class DeepSpeedCDPFinder:
    """The finder of the .pth file, for programs that import deepspeed_cdp without it. Known by its name in both places."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        return find_spec(path, target) if name == "deepspeed" else None


def _is_ours(finder: Any) -> bool:
    return getattr(finder, "__name__", None) == DeepSpeedCDPFinder.__name__


def find_spec(path: Any = None, target: Any = None) -> Any:
    """The spec of `deepspeed` as the other finders give it, with a loader that registers after execution."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if _is_ours(finder) or find is None:
            continue
        spec = find("deepspeed", path, target)
        if spec is not None:
            if spec.loader is not None:
                _hook(spec.loader)
            return spec
    return None


def _hook(loader: Any) -> None:
    """Extends this one loader object. Its class stays, so that resources and source are found as ever."""
    execute = loader.exec_module

    def exec_module(module: Any) -> None:
        execute(module)
        if module.__name__ == "deepspeed":
            _register()

    try:
        loader.exec_module = exec_module
    except AttributeError:  # a loader without a __dict__: nothing to extend, `import deepspeed_cdp` still registers
        pass


def install() -> None:
    """Registers now if deepspeed is imported already, and whenever it is imported. Idempotent."""
    if not any(_is_ours(finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, DeepSpeedCDPFinder)
    module = sys.modules.get("deepspeed")
    if module is not None and hasattr(module, "initialize"):
        _register()
