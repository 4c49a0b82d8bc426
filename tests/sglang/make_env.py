"""Builds an environment in which the real SGLang serves on a machine without a GPU.

    python tests/sglang/make_env.py [DIR]        then: DIR/bin/python -m pytest tests/sglang

Takes about 90 s and 3 GB; DIR is `.sglang_env` at the repository's root unless it is given. An
environment that was made from the same pins and shims is kept, so a second call takes a moment.

Every package is pinned in `requirements.txt` and installed without its dependencies: SGLang's own
list asks for CUDA libraries that a CPU cannot load. What is left out is stood in for by `shims/`.
"""

import subprocess
import sys
import sysconfig
import venv
from hashlib import blake2s
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SHIMS = HERE / "shims"
STAMP = "made_from"


def main() -> None:
    """Make the environment, unless it stands already."""
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".sglang_env").resolve()
    stamp, wanted = target / STAMP, _ingredients()
    if stamp.is_file() and stamp.read_text() == wanted:
        print(f"{target} is up to date")
        return
    if target.exists() and not (target / "pyvenv.cfg").is_file():
        sys.exit(f"{target} exists and is no virtual environment: choose another folder")
    venv.create(target, clear=True, with_pip=True)
    python = str(target / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "-r", str(HERE / "requirements.txt")], check=True)
    subprocess.run([*pip, "-e", str(ROOT)], check=True)
    _add_shims(Path(sysconfig.get_path("purelib", "venv", {"base": str(target)})))
    stamp.write_text(wanted)  # the last step: half an environment has no stamp
    print(f"{target} was made")


def _ingredients() -> str:
    """One digest of all that an environment is made from, with the interpreter and the place."""
    state = blake2s(f"{sys.version} {ROOT}".encode(), digest_size=16)
    for file in [Path(__file__), HERE / "requirements.txt", *sorted(SHIMS.rglob("*.py"))]:
        state.update(file.read_bytes())
    return state.hexdigest()


def _add_shims(site: Path) -> None:
    """Link the shims, and import the one that must come before torchvision in every process."""
    for shim in (SHIMS / "sgl_kernel", SHIMS / "sglang_on_cpu.py"):
        (site / shim.name).symlink_to(shim, target_is_directory=shim.is_dir())
    (site / "sglang_on_cpu.pth").write_text("import sglang_on_cpu\n")


if __name__ == "__main__":
    main()
