"""Installs deepspeed_cdp_autoload.pth beside the package, which setuptools has no setting for; the rest is pyproject.toml."""

import base64
import hashlib
import shutil
import zipfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

PTH = "deepspeed_cdp_autoload.pth"
HERE = Path(__file__).parent


class BuildPy(build_py):
    """For wheels and `pip install .`: whatever lies in build_lib lands in site-packages."""

    def run(self):
        super().run()
        if not self.editable_mode:
            Path(self.build_lib).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(HERE / PTH, Path(self.build_lib, PTH))

    def get_outputs(self, include_bytecode=True):
        built = [] if self.editable_mode else [str(Path(self.build_lib, PTH))]
        return super().get_outputs(include_bytecode) + built


class EditableWheel(editable_wheel):
    """For `pip install -e .`: adds the file and its RECORD line to the finished wheel.

    The finished wheel is the one thing that every version of setuptools makes the same way.
    """

    def run(self):
        super().run()
        for wheel in Path(self.dist_dir).glob("*.editable-*.whl"):
            _add_to_wheel(wheel, PTH, (HERE / PTH).read_bytes())


def _add_to_wheel(wheel, name, data):
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    with zipfile.ZipFile(wheel) as archive:
        entries = [(info, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for info, content in entries:
            if info.filename.endswith(".dist-info/RECORD"):
                archive.writestr(name, data)
                content = content.rstrip(b"\n") + f"\n{name},sha256={digest},{len(data)}\n".encode()
            archive.writestr(info, content)


setup(cmdclass={"build_py": BuildPy, "editable_wheel": EditableWheel})
