"""Launches the examples as users do, on two CPU ranks, in an environment that has the package; no script imports it."""

import json
import os
import shutil
import site
import sysconfig
import venv
from pathlib import Path

from support.processes import free_port, run
from support.trainer_jobs import EXAMPLES

REPOSITORY = Path(__file__).parents[2]
DRIVER = str(Path(__file__).with_name("client_driver.py"))
LAUNCHERS = {
    "deepspeed": ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--log_level", "error", "--master_port"],
    "accelerate": [
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        "--use_deepspeed",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        "--main_process_port",
    ],
}


class Launcher:
    """Runs jobs, each (example's file name, arguments, environment variables if any), in one pair of processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.EnvBuilder(with_pip=False).create(folder / "venv")
        self.python = str(folder / "venv" / "bin" / "python")
        base = {"base": str(folder / "venv"), "platbase": str(folder / "venv")}
        packages = Path(sysconfig.get_path("purelib", vars=base))
        ours = [
            path
            for path in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
            if Path(path).is_dir()
        ]
        (packages / "borrowed.pth").write_text("\n".join([str(REPOSITORY), *ours]) + "\n")
        shutil.copy(REPOSITORY / "deepspeed_cdp_autoload.pth", packages)

    def run(self, jobs: list[tuple], launcher: str = "deepspeed", seconds: float = 240) -> str:
        listed = [
            {"script": str(EXAMPLES / script), "arguments": arguments, "environment": dict(*environment)}
            for script, arguments, *environment in jobs
        ]
        file = self.folder / f"jobs_{len(list(self.folder.glob('jobs_*')))}.json"
        file.write_text(json.dumps(listed))
        variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "DEEPSPEED_CDP_AUTOLOAD")}
        variables |= {
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PATH": os.pathsep.join([str(Path(self.python).parent), sysconfig.get_path("scripts"), os.environ["PATH"]]),
        }
        command = [self.python, *LAUNCHERS[launcher], str(free_port()), DRIVER, str(file)]
        done = run(command, seconds, variables, merged=True, cwd=self.folder)
        assert done.returncode == 0, done.stdout[-20000:]
        return done.stdout
