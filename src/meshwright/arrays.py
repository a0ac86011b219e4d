"""Names of the types of arrays that modules pass on to each other."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
PyTree = Any  # arrays in any containers that JAX knows
