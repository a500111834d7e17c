"""Build the wheel named `deepspeed`, which gives Shoal under that name (`make deepspeed-wheel`), to be installed locally.

    python tools/deepspeed_wheel.py [FOLDER]

The wheel holds one module, which calls `shoal.compat.install`, and the commands of `shoal/compat/distribution.py`. It is
written by the standard library: the format is a zip of the files and of a record of their hashes (PEP 427).
"""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from pathlib import Path

from shoal.compat import distribution

STAMP = (1980, 1, 1, 0, 0, 0)
"""The time of every entry, so that equal sources give equal bytes."""

MODULE = f'''"""Shoal under the name of DeepSpeed. `pip uninstall deepspeed` removes it."""

import sys

__version__ = "{distribution.VERSION}"

from shoal.compat import install

install()
import shoal.compat.deepspeed

sys.modules[__name__] = shoal.compat.deepspeed
'''

WHEEL = "Wheel-Version: 1.0\nGenerator: shoal\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def build(folder: Path) -> Path:
    """Write the wheel into `folder` and return its path."""
    stem = f"{distribution.NAME}-{distribution.VERSION}"
    info = f"{stem}.dist-info"
    files = {"deepspeed/__init__.py": MODULE, f"{info}/METADATA": distribution.metadata(), f"{info}/WHEEL": WHEEL,
             f"{info}/entry_points.txt": distribution.entry_points(), f"{info}/top_level.txt": "deepspeed\n"}
    record = [f"{name},sha256={_digest(text)},{len(text.encode())}" for name, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name, STAMP), text)
    return path


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    print(build(Path(sys.argv[1] if len(sys.argv) > 1 else "dist/deepspeed")))
