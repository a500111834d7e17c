"""Shoal under the names of other libraries: `shoal.compat.deepspeed` is DeepSpeed's module tree, bound to Shoal.

In this package *published* means: of DeepSpeed. A published name, value or error is the one that DeepSpeed's API has.

    deepspeed/      the published tree: each file has the path and the names of a published module
    finder.py       `install()` makes `import deepspeed` give that tree
    lazy.py         modules and names of the tree are imported at their first use

Native Shoal is strict. What is tolerated under a published name (unknown keys, assertion errors, published defaults) is
written here, in the files that the tree binds.
"""

from shoal.compat.finder import install, uninstall

__all__ = ["install", "uninstall"]
