"""Why a run was out of memory: what its message says, and what the plan of its job says to that."""
