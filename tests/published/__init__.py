"""Programs against the published package, run on it and on Shoal under its name; what they observe must agree.

make peers                                       # once: DeepSpeed in .venv-peers
.venv/bin/python -m tests.published              # run all on both, print the share that agrees; --only word, --record
"""
