"""The version under the names of the module that a published build writes."""

from shoal.compat.deepspeed import __version__ as version
from shoal.compat.deepspeed.ops import __compatible_ops__ as compatible_ops

__all__ = ["compatible_ops", "git_branch", "git_hash", "installed_ops", "version"]

git_hash = git_branch = "unknown"
installed_ops = dict.fromkeys(compatible_ops, False)
