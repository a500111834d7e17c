"""Modules that are gathered whole, under their published names."""

from shoal.compat.leaf_modules import get_z3_leaf_modules as get_z3_leaf_modules
from shoal.compat.leaf_modules import set_z3_leaf_module as set_z3_leaf_module
from shoal.compat.leaf_modules import set_z3_leaf_modules as set_z3_leaf_modules
from shoal.compat.leaf_modules import set_z3_leaf_modules_by_name as set_z3_leaf_modules_by_name
from shoal.compat.leaf_modules import set_z3_leaf_modules_by_suffix as set_z3_leaf_modules_by_suffix
from shoal.compat.leaf_modules import unset_z3_leaf_modules as unset_z3_leaf_modules
from shoal.compat.leaf_modules import z3_leaf_module as z3_leaf_module
from shoal.compat.leaf_modules import z3_leaf_parameter as z3_leaf_parameter
