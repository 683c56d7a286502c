"""Which kernels a card runs, where torch chooses among several."""
