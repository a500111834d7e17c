"""Eigenvalues of the Hessian."""

from shoal.compat.unsupported import unsupported_class

_INSTEAD = "take torch.autograd.functional.hvp of the loss, before initialize"
Eigenvalue = unsupported_class("Eigenvalue", _INSTEAD)
