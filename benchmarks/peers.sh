#!/bin/sh
# Creates .venv-peers, where DeepSpeed lives: a benchmark peer must never be a dependency of the library.
# It gets the same torch as ours; its C++ ops are not built here: benchmarks/optimizer.py builds the one that it times.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3.11}
torch=${TORCH:-2.13.0}
deepspeed=${DEEPSPEED:-0.19.8}
pip="env PIP_DISABLE_PIP_VERSION_CHECK=1 .venv-peers/bin/python -m pip"

[ -x .venv-peers/bin/python ] || "$python" -m venv .venv-peers
$pip install --quiet "torch==$torch" numpy setuptools wheel ninja py-cpuinfo
DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $pip install --quiet --no-build-isolation "deepspeed==$deepspeed"
DS_ACCELERATOR=cpu .venv-peers/bin/python -c 'import deepspeed, torch; print("deepspeed", deepspeed.__version__, "on torch", torch.__version__)'
